"""The verbs between statistics and quantizing: `measure` and `plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewbits.cli_options import (
    Bandwidth,
    Context,
    Executor,
    Fits,
    Formats,
    Json,
    MaxKl,
    MaxPplRatio,
    Memory,
    MinAgreement,
    MinSpeed,
    ModelArg,
    Offline,
    Override,
    Quiet,
    Size,
    Store,
    Strategy,
    Together,
    bytes_of,
    names_of,
    progress_for,
    show_json,
)


def measure(
    model: ModelArg,
    stats: Annotated[Path, typer.Option("--stats", metavar="STATS", help="Statistics that `fewbits calibrate` wrote.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The table to write.")] = Path("sensitivity.json"),
    to: Annotated[str, typer.Option("--to", help="The target whose formats are measured.")] = "gguf",
    formats: Formats = None,
    method: Annotated[str, typer.Option("--method", help="How codes will be chosen: auto, gptq or rtn.")] = "auto",
    probes: Annotated[int, typer.Option("--probes", min=0, help="Measure so many weights directly too, to correct the rest.")] = 0,
    kv: Annotated[str | None, typer.Option("--kv", help="Formats of the KV cache to measure too, with commas: int8,int4,fp8.")] = None,
    held_out: Annotated[
        list[Path] | None, typer.Option("--held-out", help="Text for probes and KV caches. Default: the embedded text.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens that each of them is run on.")] = 4096,
    memory: Memory = "1GB",
    executor: Executor = "local",
    store: Store = None,
    offline: Offline = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict the KL of every weight in every format."""
    from fewbits.measurement import measure as run
    from fewbits.reporting import plans

    result = run(
        model, out, stats=stats, to=to, formats=names_of(formats), method=method, probes=probes, kv=names_of(kv),
        held_out=held_out or (), tokens=tokens, memory=bytes_of(memory), executor=executor, store=store, offline=offline,
        progress=progress_for(as_json, quiet),
    )  # fmt: skip
    if as_json:
        show_json(result.to_dict())
    elif not quiet:
        plans.measured(result)


def plan(
    model: ModelArg,
    sensitivity: Annotated[Path, typer.Option("--sensitivity", metavar="FILE", help="The table that `fewbits measure` wrote.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Where to write plan.json.")] = None,
    to: Annotated[str, typer.Option("--to", help="The target that the plan is for.")] = "gguf",
    size: Size = None,
    fits: Fits = None,
    context: Context = None,
    max_kl: MaxKl = None,
    min_agreement: MinAgreement = None,
    max_ppl_ratio: MaxPplRatio = None,
    formats: Formats = None,
    override: Override = None,
    together: Together = None,
    min_speed: MinSpeed = None,
    bandwidth: Bandwidth = "30GB/s",
    strategy: Strategy = "solve",
    edited: Annotated[Path | None, typer.Option("--plan", help="Instead of a budget: a plan.json that you edited, priced anew.")] = None,
    kv: Annotated[str | None, typer.Option("--kv", help="Format of the KV cache, where --fits counts it; auto: the best one.")] = None,
    explain: Annotated[list[str] | None, typer.Option("--explain", metavar="WEIGHT", help="Why a weight got its format.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The best plan that a budget buys, its frontier, and why each weight got what it got."""
    from fewbits.planning.deciding import plan as run
    from fewbits.planning.explaining import explain as explained
    from fewbits.planning.speeds import parse_bandwidth
    from fewbits.reporting import plans, terminal

    found = run(
        model, sensitivity, to=to, size=size, fits=fits, context=context, max_kl=max_kl, min_agreement=min_agreement,
        max_ppl_ratio=max_ppl_ratio, formats=names_of(formats), override=override or (), together=together or (),
        min_speed=min_speed, bandwidth=parse_bandwidth(bandwidth), strategy=strategy, kv=kv, edited=edited,
    )  # fmt: skip
    reasons = [explained(found, name) for name in explain or ()]  # before anything is written: a name may be wrong
    if out:
        found.save(out)
    if as_json:
        show_json(found.to_dict() | {"explained": [each.to_dict() for each in reasons]})
    elif not quiet:
        plans.decided(found)
        for each in reasons:
            plans.explained(each)
        if out:
            terminal.console.print(f"wrote {out}")
