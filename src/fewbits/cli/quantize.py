"""`fewbits quantize`: a checkpoint to a verified file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewbits.cli import onnx, options
from fewbits.cli.output import note_default_text, progress_for, show


def quantize(
    model: options.ModelArg,
    out: Annotated[Path, typer.Option("-o", "--out", help="File (or folder) to write.")],
    size: options.Size = None,
    format: Annotated[str | None, typer.Option("--format", help="One format for all weights.")] = None,
    data: options.Calibration = None,
    imatrix: options.Imatrix = None,
    to: options.To = None,
    fits: options.Fits = None,
    context: options.Context = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="A plan.json, as written or edited by hand.")] = None,
    override: options.Override = None,
    formats: options.Formats = None,
    together: options.Together = None,
    min_speed: options.MinSpeed = None,
    bandwidth: options.Bandwidth = "30GB/s",
    strategy: options.Strategy = "solve",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Plans to try at most, until an accuracy is met.")] = 5,
    method: Annotated[str, typer.Option("--method", help="How codes are chosen: auto (what measures best), gptq or rtn.")] = "auto",
    held_out: options.HeldOut = None,
    weights: options.Weights = None,
    stats: options.Stats = None,
    samples: options.Samples = 512,
    seed: options.Seed = 0,
    rewrite: Annotated[
        str | None,
        typer.Option(
            "--rewrite",
            help="Rescale channels first: none, auto, awq or smoothquant. Default: smoothquant for int8 activations, else none.",
        ),
    ] = None,
    tune: Annotated[
        int | None,
        typer.Option(
            "--tune",
            min=0,
            help="Then tune all scales to the float model's predictions, in so many steps. Default: 100 below four bits, else 0.",
        ),
    ] = None,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Take each block's statistics after the blocks before it were quantized.")
    ] = False,
    activations: Annotated[str, typer.Option("--activations", help="none, int8, fp8 (either with :static), or nvfp4.")] = "none",
    activations_kl: Annotated[
        float | None,
        typer.Option(
            "--activations-kl",
            min=0,
            help="KL that this is predicted to cost at most: beyond it the costliest inputs stay. Default: 0.005 for int8.",
        ),
    ] = None,
    kv: Annotated[str | None, typer.Option("--kv", help="Format of the KV cache: int8, int4, fp8.")] = None,
    memory: options.Memory = "1GB",
    device: options.Device = "auto",
    max_kl: options.MaxKl = None,
    min_agreement: options.MinAgreement = None,
    max_ppl_ratio: options.MaxPplRatio = None,
    length: options.Length = None,
    tokens: options.Tokens = 16384,
    min_cosine: options.MinCosine = None,
    max_error: options.MaxError = None,
    split_size: options.SplitSize = None,
    like: options.Like = None,
    converter: options.Converter = None,
    accept_unmatched: Annotated[
        bool, typer.Option("--accept-unmatched", help="Carry over what of --like is not in the checkpoint, even if it is more than 1 %.")
    ] = False,
    max_floor: Annotated[float, typer.Option("--max-floor", help="KL of the float file in llama.cpp above which nothing is begun.")] = 1e-3,
    requantize: Annotated[
        bool, typer.Option("--requantize", help="MODEL may be a GGUF that is quantized already: it is then the reference.")
    ] = False,
    answers: Annotated[int, typer.Option("--answers", min=0, help="Answers of the file and its source side by side on the page.")] = 3,
    within: options.Within = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Write the file without running it.")] = False,
    executor: options.ExecutorOrAuto = "auto",
    store: options.Store = None,
    shards: options.Shards = 1,
    fresh: options.Fresh = False,
    offline: options.Offline = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """A checkpoint to a quantized file, verified in the runtime that it is meant for. Or a float .onnx file to a packed one."""
    if model.lower().endswith(".onnx"):
        refused = {
            "--size": size, "--fits": fits, "--kv": kv, "--stats": stats, "--rewrite": rewrite, "--tune": tune, "--to": to,
            "--activations-kl": activations_kl is not None,
            "--sequential": sequential, "--max-kl": max_kl, "--min-agreement": min_agreement, "--max-ppl-ratio": max_ppl_ratio,
            "--held-out": held_out, "--formats": formats, "--together": together, "--split-size": split_size,
            "--executor": executor.lower() not in ("auto", "local"), "--store": store, "--shards": shards > 1, "--like": like,
            "--converter": converter, "--imatrix": imatrix, "--weights": weights, "--device": device != "auto", "--within": within,
        }  # fmt: skip
        onnx.quantize(
            model, out, refused, as_json, quiet, format=format, plan=plan, override=override or (), method=method, activations=activations,
            data=data or (), samples=samples, seed=seed, min_cosine=min_cosine, max_error=max_error, no_verify=no_verify,
        )  # fmt: skip
    onnx.refuse_max_error(max_error)
    from fewbits.pipeline import quantize as run
    from fewbits.planning.speed import parse_bandwidth
    from fewbits.reporting.terminal import quantized

    text_given = {"calibrated": data or stats or imatrix or method == "rtn", "judged": data or held_out or no_verify}
    if not (all(text_given.values()) or as_json or quiet):
        note_default_text(model, " and ".join(step for step, given in text_given.items() if not given))
    result = run(
        model, out, to=to, split_size=split_size, size=size, fits=fits, context=context, format=format, plan=plan,
        override=override or (), formats=options.names_of(formats), together=together or (), min_speed=min_speed,
        bandwidth=parse_bandwidth(bandwidth), strategy=strategy, rounds=rounds, method=method, data=data or (), held_out=held_out or (),
        stats=stats, samples=samples, seed=seed, rewrite=rewrite, sequential=sequential, tune=tune, activations=activations,
        activations_kl=activations_kl, kv=kv, weights=weights, memory=options.bytes_of(memory), device=device, within=within,
        began=options.BEGAN, max_kl=max_kl, min_agreement=min_agreement, max_ppl_ratio=max_ppl_ratio,
        min_cosine=min_cosine, length=length, tokens=tokens, no_verify=no_verify, executor=executor, store=store, shards=shards,
        fresh=fresh, offline=offline, like=like, converter=converter, accept_unmatched=accept_unmatched, max_floor=max_floor,
        imatrix=imatrix, requantize=requantize, answers=answers, progress=progress_for(as_json, quiet),
    )  # fmt: skip
    show(result, quantized.show, as_json, quiet)
    raise typer.Exit(0 if result.verdict is None or result.verdict.passed else 1)
