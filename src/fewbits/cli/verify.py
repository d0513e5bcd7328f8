"""`fewbits verify`: a file in its runtime, against the float model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewbits.cli import onnx, options
from fewbits.cli.output import note_default_text, progress_for, show


def verify(
    path: Annotated[Path, typer.Argument(metavar="OUT", help="A .gguf, an .onnx, or a folder that fewbits wrote.")],
    against: Annotated[str, typer.Option("--against", metavar="MODEL", help="The float model; a quantized GGUF is said to be one.")],
    data: options.Data = None,
    weights: options.Weights = None,
    runtime: Annotated[
        str, typer.Option("--runtime", help="auto, llama.cpp, onnxruntime, onnxruntime-genai, transformers or torch.")
    ] = "auto",
    max_kl: options.MaxKl = None,
    min_agreement: options.MinAgreement = None,
    max_ppl_ratio: options.MaxPplRatio = None,
    length: options.Length = None,
    tokens: options.Tokens = 16384,
    min_cosine: options.MinCosine = None,
    max_error: options.MaxError = None,
    memory: options.Memory = "1GB",
    device: options.Device = "auto",
    no_floor: Annotated[bool, typer.Option("--no-floor", help="Do not also run the float file in the same runtime.")] = False,
    like: options.Like = None,
    offline: options.Offline = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Run a file in the runtime it is meant for, and judge it against the float model; an .onnx file also against a float .onnx file."""
    if against.lower().endswith(".onnx"):
        refused = {
            "--max-kl": max_kl,
            "--min-agreement": min_agreement,
            "--max-ppl-ratio": max_ppl_ratio,
            "--length": length,
            "--weights": weights,
        }
        onnx.verify(path, against, refused, as_json, quiet, data=data or (), min_cosine=min_cosine, max_error=max_error)
    onnx.refuse_max_error(max_error)
    from fewbits.reporting.terminal import verdicts
    from fewbits.verification.files import verify as run

    if not data and not (as_json or quiet):
        note_default_text(against, "judged")
    verdict = run(
        path, against, data=data or (), weights=weights, runtime=runtime, max_kl=max_kl, min_agreement=min_agreement,
        max_ppl_ratio=max_ppl_ratio, min_cosine=min_cosine, length=length, tokens=tokens, no_floor=no_floor,
        memory=options.bytes_of(memory), device=device, like=like, offline=offline, progress=progress_for(as_json, quiet),
    )  # fmt: skip
    show(verdict, verdicts.show, as_json, quiet)
    raise typer.Exit(0 if verdict.passed else 1)
