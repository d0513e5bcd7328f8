"""The command line: one subcommand per verb, no logic. stdout is data (`--json`), everything for people is on stderr."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fewbits import cli_bench, cli_compare, cli_demo, cli_fit, cli_onnx, cli_plan, cli_report, cli_run, cli_stop
from fewbits.cli_options import (
    Bandwidth,
    Calibration,
    Context,
    Data,
    Executor,
    Fits,
    Formats,
    Fresh,
    HeldOut,
    Json,
    Length,
    MaxError,
    MaxKl,
    MaxPplRatio,
    Memory,
    MinAgreement,
    MinCosine,
    MinSpeed,
    ModelArg,
    Offline,
    Override,
    Quiet,
    Samples,
    Seed,
    Shards,
    Size,
    SplitSize,
    Store,
    Strategy,
    To,
    Together,
    Tokens,
    bytes_of,
    length_of,
    names_of,
    progress_for,
    show_json,
    split_bytes,
)
from fewbits.errors import FewbitsError

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(cli_bench.bench, name="bench")
app.command()(cli_demo.demo)
app.command()(cli_plan.measure)
app.command()(cli_plan.plan)
app.command()(cli_compare.compare)
app.command()(cli_run.run)
app.command()(cli_report.report)
app.command()(cli_fit.fit)


@app.callback()
def fewbits() -> None:
    """Quantize a transformer to a budget, into a file that a real runtime loads, with proof."""


@app.command()
def quantize(
    model: ModelArg,
    out: Annotated[Path, typer.Option("-o", "--out", help="File (or folder) to write.")],
    to: To = None,
    size: Size = None,
    fits: Fits = None,
    context: Context = None,
    format: Annotated[str | None, typer.Option("--format", help="One format for all weights.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="A plan.json, as written or edited by hand.")] = None,
    override: Override = None,
    formats: Formats = None,
    together: Together = None,
    min_speed: MinSpeed = None,
    bandwidth: Bandwidth = "30GB/s",
    strategy: Strategy = "solve",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Plans to try at most, until an accuracy is met.")] = 5,
    method: Annotated[str, typer.Option("--method", help="How codes are chosen: auto (what measures best), gptq or rtn.")] = "auto",
    data: Calibration = None,
    held_out: HeldOut = None,
    stats: Annotated[Path | None, typer.Option("--stats", help="Statistics that `fewbits calibrate` wrote, instead of new ones.")] = None,
    samples: Samples = 512,
    seed: Seed = 0,
    rewrite: Annotated[
        str, typer.Option("--rewrite", help="Rescale channels first, leaving the function as it is: none, auto, awq or smoothquant.")
    ] = "none",
    tune: Annotated[
        int, typer.Option("--tune", min=0, help="Then tune scales on each block's output for so many steps; 200 is usual.")
    ] = 0,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Take each block's statistics after the blocks before it were quantized.")
    ] = False,
    activations: Annotated[str, typer.Option("--activations", help="none, int8, fp8, and :static after either.")] = "none",
    kv: Annotated[str | None, typer.Option("--kv", help="Format of the KV cache: int8, int4, fp8.")] = None,
    memory: Memory = "1GB",
    max_kl: MaxKl = None,
    min_agreement: MinAgreement = None,
    max_ppl_ratio: MaxPplRatio = None,
    length: Length = None,
    tokens: Tokens = 16384,
    min_cosine: MinCosine = None,
    max_error: MaxError = None,
    split_size: SplitSize = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Write the file without running it.")] = False,
    executor: Executor = "local",
    store: Store = None,
    shards: Shards = 1,
    fresh: Fresh = False,
    offline: Offline = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """A checkpoint to a quantized file, verified in the runtime that it is meant for. Or a float .onnx file to a packed one."""
    if model.lower().endswith(".onnx"):
        given = {
            "--size": size, "--fits": fits, "--kv": kv, "--stats": stats, "--rewrite": rewrite != "none", "--tune": tune, "--to": to,
            "--sequential": sequential, "--max-kl": max_kl, "--min-agreement": min_agreement, "--max-ppl-ratio": max_ppl_ratio,
            "--held-out": held_out, "--formats": formats, "--together": together, "--split-size": split_size,
            "--executor": executor != "local", "--store": store, "--shards": shards > 1,
        }  # fmt: skip
        cli_onnx.quantize(
            model, out, given, as_json, quiet, format=format, plan=plan, override=override or (), method=method, activations=activations,
            data=data or (), samples=samples, seed=seed, min_cosine=min_cosine, max_error=max_error, no_verify=no_verify,
        )  # fmt: skip
    cli_onnx.refuse_max_error(max_error)
    from fewbits.pipeline import quantize as run
    from fewbits.pipeline import size_of
    from fewbits.planning.speeds import parse_bandwidth
    from fewbits.reporting import plans, terminal, verdicts

    used = [what for what, own in (("calibrated", data or stats or method == "rtn"), ("judged", data or held_out or no_verify)) if not own]
    if used and not (as_json or quiet):
        _warn_about_default_text(model, " and ".join(used))
    result = run(
        model, out, to=to, split=split_bytes(split_size), size=size, fits=fits, context=context,
        format=format, plan=plan, override=override or (),
        formats=names_of(formats), together=together or (), min_speed=min_speed,
        bandwidth=parse_bandwidth(bandwidth), strategy=strategy, rounds=rounds, method=method, data=data or (), held_out=held_out or (),
        stats=stats, samples=samples, seed=seed,
        rewrite=rewrite, sequential=sequential, tune=tune, activations=activations, kv=kv, memory=bytes_of(memory),
        max_kl=max_kl,
        min_agreement=min_agreement, max_ppl_ratio=max_ppl_ratio, min_cosine=min_cosine, length=length, tokens=tokens,
        no_verify=no_verify, executor=executor, store=store, shards=shards, fresh=fresh, offline=offline,
        progress=progress_for(as_json, quiet),
    )  # fmt: skip
    if as_json:
        show_json(result.to_dict())
    elif not quiet:
        if result.decision:
            plans.decided(result.decision)
        else:
            terminal.plan_summary(result.plan)
        terminal.outcomes(result.outcomes)
        if result.coverage:
            terminal.warnings(result.coverage.warnings)
        if result.rounds and result.decision:
            least = min(point.kl for point in result.decision.frontier())
            plans.rounds(result.rounds, bool(result.verdict and result.verdict.passed), least)
        if result.verdict:
            verdicts.show(result.verdict)
        terminal.console.print(f"wrote {result.path} ({terminal.size(size_of(result.path))}); artifact and plan.json in {result.artifact}/")
        terminal.console.print(f"the report: {result.artifact.parent / 'report.html'}")
    raise typer.Exit(0 if result.verdict is None or result.verdict.passed else 1)


@app.command()
def calibrate(
    model: ModelArg,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="STATS", help="Folder for the statistics.")],
    data: Calibration = None,
    samples: Samples = 512,
    length: Annotated[str | None, typer.Option("--length", help="Tokens in a sample, or `data`: as long as each document.")] = None,
    seed: Seed = 0,
    held_out: Annotated[list[Path] | None, typer.Option("--held-out", help="The text that results will be judged on.")] = None,
    no_hessians: Annotated[bool, typer.Option("--no-hessians", help="No second moments between columns: gptq needs them.")] = False,
    no_gradients: Annotated[
        bool, typer.Option("--no-gradients", help="No backward pass: nothing is known of what moves the loss.")
    ] = False,
    memory: Memory = "1GB",
    merge: Annotated[list[Path] | None, typer.Option("--merge", help="Add these to statistics of other texts, taken before.")] = None,
    imatrix: Annotated[Path | None, typer.Option("--imatrix", help="Also write llama.cpp's importance matrix here.")] = None,
    executor: Executor = "local",
    store: Store = None,
    shards: Shards = 1,
    offline: Offline = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Statistics of a model's inputs and gradients on a text, and how well that text represents use."""
    from fewbits.calibration import calibrate as run
    from fewbits.reporting import terminal

    if not data and not (as_json or quiet):
        _warn_about_default_text(model, "calibrated")
    result = run(
        model, out, data=data or (), samples=samples, length=length_of(length), seed=seed, held_out=held_out or (),
        hessians=not no_hessians, gradients=not no_gradients, memory=bytes_of(memory), merge=merge or (), imatrix=imatrix,
        executor=executor, store=store, shards=shards, offline=offline,
        progress=progress_for(as_json, quiet),
    )  # fmt: skip
    if as_json:
        show_json(result.to_dict())
    elif not quiet:
        terminal.calibration(result)


@app.command()
def formats(as_json: Json = False) -> None:
    """Every format: bits per weight, who carries it, what runs it here."""
    from fewbits import formats as known
    from fewbits import kernels, targets
    from fewbits.model import Weight
    from fewbits.reporting import terminal

    shape = (4096, 4096)
    weight = Weight("any", shape, "mlp", "fp16")
    rows = []
    for fmt in known.all().values():
        files = (target for target in targets.all().values() if target.runtime != "torch")  # our own artifact carries them all
        carriers = [target.name for target in files if target.accepts(weight, fmt) is None]
        rows.append((fmt, fmt.bits_per_weight(shape), carriers, kernels.who(fmt, shape)))
    if as_json:
        keys = ("name", "about", "run", "block")
        listed = [
            {k: getattr(f, k) for k in keys} | {"bits_per_weight": bits, "targets": to, "kernel": kernel} for f, bits, to, kernel in rows
        ]
        show_json(listed)
    else:
        terminal.formats((f, bits, ", ".join(to), kernel) for f, bits, to, kernel in rows)


@app.command()
def doctor(as_json: Json = False) -> None:
    """What runs here: instruction sets, kernels, runtimes, versions; what is missing and how to get it."""
    from fewbits.diagnosis import diagnose
    from fewbits.reporting import diagnosis as report

    found = diagnose()
    if as_json:
        show_json(found.to_dict())
    else:
        report.show(found)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint folder, a GGUF, an ONNX or a fewbits artifact.")],
    no_values: Annotated[bool, typer.Option("--no-values", help="Headers only: do not read the weights.")] = False,
    as_json: Json = False,
) -> None:
    """What is in a file: tensors, types, sizes, metadata, distributions, values that are not finite."""
    from fewbits.inspection import inspect as run
    from fewbits.reporting import terminal

    found = run(path, not no_values, progress_for(as_json, False))
    if as_json:
        show_json(found.to_dict())
    else:
        terminal.inspection(found)


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(metavar="OUT", help="A .gguf, an .onnx, or a folder that fewbits wrote.")],
    against: Annotated[str, typer.Option("--against", metavar="MODEL", help="The float model.")],
    data: Data = None,
    runtime: Annotated[
        str, typer.Option("--runtime", help="auto, llama.cpp, onnxruntime, onnxruntime-genai, transformers or torch.")
    ] = "auto",
    max_kl: MaxKl = None,
    min_agreement: MinAgreement = None,
    max_ppl_ratio: MaxPplRatio = None,
    length: Length = None,
    tokens: Tokens = 16384,
    min_cosine: MinCosine = None,
    max_error: MaxError = None,
    memory: Memory = "1GB",
    no_floor: Annotated[bool, typer.Option("--no-floor", help="Do not also run the float file in the same runtime.")] = False,
    offline: Offline = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a file in the runtime it is meant for, and judge it against the float model; an .onnx file also against a float .onnx file."""
    if against.lower().endswith(".onnx"):
        given = {"--max-kl": max_kl, "--min-agreement": min_agreement, "--max-ppl-ratio": max_ppl_ratio, "--length": length}
        cli_onnx.verify(path, against, given, as_json, quiet, data=data or (), min_cosine=min_cosine, max_error=max_error)
    cli_onnx.refuse_max_error(max_error)
    from fewbits.pipeline import verify as run
    from fewbits.reporting import verdicts

    if not data and not (as_json or quiet):
        _warn_about_default_text(against, "judged")
    verdict = run(
        path, against, data=data or (), runtime=runtime, max_kl=max_kl, min_agreement=min_agreement, max_ppl_ratio=max_ppl_ratio,
        min_cosine=min_cosine, length=length, tokens=tokens, floor=not no_floor, memory=bytes_of(memory), offline=offline,
        progress=progress_for(as_json, quiet),
    )  # fmt: skip
    if as_json:
        show_json(verdict.to_dict())
    elif not quiet:
        verdicts.show(verdict)
    raise typer.Exit(0 if verdict.passed else 1)


@app.command()
def export(
    artifact: Annotated[Path, typer.Argument(help="A fewbits artifact folder.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="File (or folder) to write.")],
    to: To = None,
    split_size: SplitSize = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """One artifact, any target that accepts its formats."""
    from fewbits.pipeline import export as run
    from fewbits.pipeline import size_of
    from fewbits.reporting import terminal

    path = run(artifact, out, to=to, split=split_bytes(split_size), progress=progress_for(as_json, quiet))
    if as_json:
        show_json({"file": str(path), "bytes": size_of(path)})
    elif not quiet:
        terminal.console.print(f"wrote {path} ({terminal.size(size_of(path))})")


_AS_READ = [  # by people, in --help
    "demo", "fit", "quantize", "verify", "run", "export", "report", "inspect", "formats", "compare", "calibrate", "measure", "plan",
    "doctor",
]  # fmt: skip
app.registered_commands.sort(key=lambda command: _AS_READ.index(command.name or command.callback.__name__))  # type: ignore[union-attr]


def main() -> NoReturn:
    """Every foreseeable failure ends in a message, a hint and an exit code; what is not foreseen keeps its traceback."""
    from fewbits.files import is_full_disk

    _quiet_libraries()
    cli_stop.arm()
    try:
        app()
    except FewbitsError as failure:
        _fail(failure.args[0], failure.hint, failure.exit_code)
    except MemoryError:
        _fail("not enough memory", "close other programs, or use a smaller model", 3)
    except OSError as failure:
        if is_full_disk(failure):
            _fail(f"the disk is full: {failure}", "free some space or choose another `-o`", 3)
        if failure.filename is None:
            raise
        _fail(f"`{failure.filename}`: {failure.strerror}", "check the path and its permissions", 2)
    except SystemExit as ended:
        cli_stop.say(ended.code)
        raise
    sys.exit(0)


def _fail(message: str, hint: str, code: int) -> NoReturn:
    from fewbits.reporting import terminal

    terminal.error(message, hint)
    sys.exit(code)


def _warn_about_default_text(model: str, what: str) -> None:
    from fewbits import embedded
    from fewbits.reporting import terminal

    if Path(model).resolve() != embedded.MODEL.resolve():
        terminal.note(f"no `--data` given: {what} on Python documentation, which may be unlike what this model is used for")


def _quiet_libraries() -> None:
    """Their bars and notes would mix with ours; errors still come through."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


if __name__ == "__main__":
    main()
