"""`fewbits measure`: the damage of every format to every weight."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewbits.cli import options
from fewbits.cli.output import progress_for, show


def measure(
    model: options.ModelArg,
    stats: Annotated[Path, typer.Option("--stats", metavar="STATS", help="Statistics that `fewbits calibrate` wrote.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The table to write.")] = Path("sensitivity.json"),
    to: Annotated[str, typer.Option("--to", help="The target whose formats are measured.")] = "gguf",
    formats: options.Formats = None,
    method: Annotated[str, typer.Option("--method", help="How codes will be chosen: auto, gptq or rtn.")] = "auto",
    probes: Annotated[int, typer.Option("--probes", min=0, help="Measure so many weights directly too, to correct the rest.")] = 0,
    kv: Annotated[str | None, typer.Option("--kv", help="Formats of the KV cache to measure too, with commas: int8,int4,fp8.")] = None,
    held_out: Annotated[
        list[Path] | None, typer.Option("--held-out", help="Text for probes and KV caches. Default: the embedded text.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens that each of them is run on.")] = 4096,
    memory: options.Memory = "1GB",
    executor: options.Executor = "local",
    store: options.Store = None,
    like: options.Like = None,
    converter: options.Converter = None,
    offline: options.Offline = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Predict the KL of every weight in every format."""
    from fewbits.reporting.terminal import plans
    from fewbits.verification.forecast.measurement import measure as run

    result = run(
        model, out, stats=stats, to=to, formats=options.names_of(formats), method=method, probes=probes, kv=options.names_of(kv),
        held_out=held_out or (), tokens=tokens, memory=options.bytes_of(memory), executor=executor, store=store, like=like,
        converter=converter, offline=offline, progress=progress_for(as_json, quiet),
    )  # fmt: skip
    show(result, plans.measured, as_json, quiet)
