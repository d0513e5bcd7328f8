"""`fewbits plan`: the best plan for a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewbits.cli import options
from fewbits.cli.output import show_json


def plan(
    model: options.ModelArg,
    sensitivity: Annotated[Path, typer.Option("--sensitivity", metavar="FILE", help="The table that `fewbits measure` wrote.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Where to write plan.json.")] = None,
    to: Annotated[str, typer.Option("--to", help="The target that the plan is for.")] = "gguf",
    size: options.Size = None,
    fits: options.Fits = None,
    context: options.Context = None,
    max_kl: options.MaxKl = None,
    min_agreement: options.MinAgreement = None,
    max_ppl_ratio: options.MaxPplRatio = None,
    formats: options.Formats = None,
    override: options.Override = None,
    together: options.Together = None,
    min_speed: options.MinSpeed = None,
    bandwidth: options.Bandwidth = "30GB/s",
    strategy: options.Strategy = "solve",
    edited: Annotated[Path | None, typer.Option("--plan", help="Instead of a budget: a plan.json that you edited, priced anew.")] = None,
    kv: Annotated[str | None, typer.Option("--kv", help="Format of the KV cache, where --fits counts it; auto: the best one.")] = None,
    explain: Annotated[list[str] | None, typer.Option("--explain", metavar="WEIGHT", help="Why a weight got its format.")] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """The best plan that a budget buys, its frontier, and why each weight got what it got."""
    from fewbits.planning.explanation import explain as explained
    from fewbits.planning.speed import parse_bandwidth
    from fewbits.reporting.terminal import console, plans
    from fewbits.targets.plan import plan as run

    decision = run(
        model, sensitivity, to=to, size=size, fits=fits, context=context, max_kl=max_kl, min_agreement=min_agreement,
        max_ppl_ratio=max_ppl_ratio, formats=options.names_of(formats), override=override or (), together=together or (),
        min_speed=min_speed, bandwidth=parse_bandwidth(bandwidth), strategy=strategy, kv=kv, plan=edited,
    )  # fmt: skip
    reasons = [explained(decision, name) for name in explain or ()]  # before anything is written: a name may be wrong
    if out:
        decision.save(out)
    if as_json:
        show_json(decision.to_dict() | {"explained": [each.to_dict() for each in reasons]})
    elif not quiet:
        with console.on_stdout():
            plans.decided(decision)
            for each in reasons:
                plans.explained(each)
        if out:
            console.print(f"wrote {out}")
