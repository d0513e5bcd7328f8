"""`fewbits bench`: measurements against peers and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewbits.cli_options import Calibration, HeldOut, Json, ModelArg, Samples, Tokens, progress_for, show_json

bench = typer.Typer(no_args_is_help=True, help="Measurements against peers and limits, as ratios in one run.")


@bench.command()
def quality(
    model: ModelArg,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for files and measurements: a run that was stopped goes on from it.")],
    data: Calibration = None,
    held_out: HeldOut = None,
    stats: Annotated[Path | None, typer.Option("--stats", help="Statistics that `fewbits calibrate` wrote, instead of new ones.")] = None,
    formats: Annotated[str, typer.Option("--formats", help="GGUF formats, with commas.")] = "q4_0,q4_1,q5_0,iq4_nl",
    guard: Annotated[str, typer.Option("--guard", help="Of these, the ones to make with the plain Hessian too.")] = "q4_0",
    samples: Samples = 64,
    tokens: Tokens = 40960,
    method: Annotated[str, typer.Option("--method", help="Ours: auto, gptq or rtn.")] = "auto",
    whole: Annotated[bool, typer.Option("--whole", help="Quantize the embedding too, instead of keeping it.")] = False,
    as_json: Json = False,
) -> None:
    """Same bytes, in llama.cpp: KL of its own quantizer with an importance matrix, ours, and ours with the plain Hessian."""
    from fewbits.benchmarks.quality import quality as run
    from fewbits.reporting import terminal

    result = run(
        model, out, data=data or (), held_out=held_out or (), stats=stats, names=formats.split(","),
        guard=guard.split(","), samples=samples, tokens=tokens, method=method,
        keep=() if whole else ("embed|wte|lm_head=keep",), progress=progress_for(as_json, False),
    )  # fmt: skip
    if as_json:
        show_json(result.to_dict())
    else:
        terminal.quality(result)


@bench.command()
def plans(
    model: ModelArg,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for files and measurements: a run that was stopped goes on from it.")],
    data: Calibration = None,
    held_out: HeldOut = None,
    stats: Annotated[Path | None, typer.Option("--stats", help="Statistics that `fewbits calibrate` wrote, instead of new ones.")] = None,
    mixes: Annotated[str, typer.Option("--mixes", help="llama.cpp's mixes to compare with.")] = "q4_k_m,iq4_xs,q3_k_m,q4_0,q2_k",
    samples: Samples = 64,
    tokens: Tokens = 40960,
    as_json: Json = False,
) -> None:
    """Same bytes, in llama.cpp: its own mixes with its own quantizer, that quantizer with our allocation, and ours."""
    from fewbits.benchmarks.plans import plans as run
    from fewbits.reporting import plans as tables

    result = run(
        model, out, data=data or (), held_out=held_out or (), stats=stats, mixes=mixes.split(","), samples=samples, tokens=tokens,
        progress=progress_for(as_json, False),
    )  # fmt: skip
    if as_json:
        show_json(result.to_dict())
    else:
        tables.contest(result)


@bench.command()
def cost(
    model: ModelArg,
    data: Calibration = None,
    samples: Samples = 64,
    format: Annotated[str, typer.Option("--format", help="For the last step.")] = "q4_0",
    method: Annotated[str, typer.Option("--method", help="For the last step.")] = "gptq",
    as_json: Json = False,
) -> None:
    """Time of statistics and of quantizing, in forward passes over the same text, and peak memory."""
    from fewbits.benchmarks.cost import cost as run
    from fewbits.reporting import terminal

    result = run(model, data=data or (), samples=samples, format=format, method=method, progress=progress_for(as_json, False))
    if as_json:
        show_json(result.to_dict())
    else:
        terminal.cost(result)
