"""Tables of sensitivities, plans and frontiers for a person at a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from fewbits.reporting.terminal import console, new_table, note, size
from fewbits.reporting.terminal.tables import Column, fitted

if TYPE_CHECKING:
    from fewbits.planning import Plan
    from fewbits.planning.allocation import Point
    from fewbits.planning.decision import Decision
    from fewbits.planning.explanation import Explanation
    from fewbits.planning.rounds import Round
    from fewbits.verification.forecast.block_errors import Accumulation
    from fewbits.verification.forecast.measurement import Measured

_MOST = 8  # weights shown
_BAR = 30  # characters, if there is room
_BESIDE_BAR = 56  # of the figures before it and the mark after it


def summary(plan: Plan) -> None:
    counts: dict[str, list[int]] = {}
    for entry in plan.entries:
        row = counts.setdefault(entry.format, [0, 0])
        row[0], row[1] = row[0] + 1, row[1] + entry.nbytes
    table = new_table("plan", ("format", "weights", "bytes"))
    for name, (count, nbytes) in sorted(counts.items(), key=lambda item: -item[1][1]):
        table.add_row(name, str(count), size(nbytes))
    table.add_row("all", str(len(plan.entries)), f"{size(plan.nbytes)}, {plan.bits_per_weight:.3f} bits per weight", style="bold")
    console.print(table)
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in plan.fallbacks:
        reasons.setdefault((entry.format, entry.reason), []).append(entry.weight)
    for (name, reason), weights in reasons.items():
        which = weights[0] if len(weights) == 1 else f"{len(weights)} weights (the first: {weights[0]})"
        note(f"{which} stored as {name}: {reason}")


def measured(result: Measured) -> None:
    table = result.table
    worst = max(table.rows, key=lambda name: max(cell.kl for cell in table.rows[name].values()))
    formats = list(table.rows[worst])
    totals = {fmt: sum(table.kl(w, fmt) for w in table.weights if fmt in table.rows[w.name]) for fmt in formats}
    covered = {fmt: sum(fmt in row for row in table.rows.values()) for fmt in formats}
    shown = new_table("predicted KL, if all weights that fit had one format", ("format", "weights", "KL", "the most of it"))
    for fmt in sorted(formats, key=lambda name: -totals[name]):
        most = max((w for w in table.weights if fmt in table.rows[w.name]), key=lambda w: table.rows[w.name][fmt].kl)
        shown.add_row(fmt, str(covered[fmt]), f"{totals[fmt]:.2g}", f"{most.name} ({table.rows[most.name][fmt].kl:.1g})")
    console.print(shown)
    if result.probes:
        from fewbits.verification.forecast import probes

        console.print(f"{len(result.probes)} single weights measured: log-correlation {probes.log_correlation(result.probes):.3f}")
        for kind, factor in table.factors.items():
            console.print(f"  {kind}: measured {factor.factor:.2f} x predicted (spread {factor.spread:.2f}, {factor.weights} measured)")
        compared = new_table("measures of damage", ("measure", "rank correlation", "bits per weight wasted"))
        for score in probes.compare_scores(table, result.probes, result.target):
            compared.add_row(score.name, f"{score.rank_correlation:.3f}", f"{score.bits_wasted:.3f}")
        console.print(compared)
    console.print(f"wrote {result.path}")


def decided(decision: Decision) -> None:
    plan = decision.plan
    summary(plan)
    speed = decision.allocator.tokens_per_second(plan)
    forecast = f"about {speed:.0f} tokens/s at {decision.allocator.bandwidth / 1e9:.0f} GB/s"
    why = (
        "a format or a method was not measured"
        if decision.allocator.table.predicts
        else "bits were given by weighted errors, without gradients"
    )
    console.print(f"predicted KL {f'not known: {why}' if plan.kl is None else f'{plan.kl:.4f}'}, {forecast}")
    if plan.kinds:
        of = "by kind of text" if len(plan.kinds) > 1 else "on the text that it is judged on"
        console.print(f"  {of}: {escape(plan.kinds_text())}", soft_wrap=True)
    if decision.kv:
        cost = decision.allocator.table.kv.get(decision.kv)
        console.print(f"KV cache in {decision.kv}" + (f", which costs a KL of {cost:.1e} more" if cost else ""))
    if decision.edited and plan.kl:
        best = decision.allocator.within_bytes(plan.nbytes, "")
        console.print(f"the best plan of this size: predicted KL {best.kl:.4f}")
    simple = decision.simple
    if simple is not None and simple is not plan and simple.kl and plan.kl:
        by_size, by_kl = f"{simple.nbytes / plan.nbytes:.2f} times the bytes", f"{simple.kl / plan.kl:.1f} times the KL"
        console.print(f"by thresholds: KL {simple.kl:.4f} at {size(simple.nbytes)}, {by_size if decision.limit is None else by_kl}")
    elif simple is None and decision.limit is not None:
        console.print("by thresholds (4, 8 or 16 bits): nothing meets this budget")
    if not decision.allocator.table.predicts:
        return
    frontier(decision.frontier(), plan.nbytes)
    ranked = sorted((entry for entry in plan.entries if entry.kl is not None), key=lambda entry: -(entry.kl or 0.0))[:_MOST]
    shown = new_table("where most of the damage is", ("weight", "format", "bytes", "KL"))
    for entry in ranked:
        shown.add_row(escape(entry.weight), entry.format, size(entry.nbytes), f"{entry.kl:.1e}")
    console.print(shown)


def frontier(points: Sequence[Point], here: int | None = None) -> None:
    """KL over size, as bars on a logarithmic scale."""
    useful = [point for point in points if point.kl > 0]
    if not useful:
        return
    low, high = (math.log(f(point.kl for point in useful)) for f in (min, max))
    shown = new_table("frontier", ("bits per weight", "bytes", "predicted KL", ""))
    nearest = min(useful, key=lambda point: abs(point.nbytes - here)) if here is not None else None
    longest = max(1, min(_BAR, console.width - _BESIDE_BAR))
    for point in useful:
        bar = "#" * max(1, round(longest * (math.log(point.kl) - low) / max(high - low, 1e-9)))
        mark = " <- near here" if point is nearest else ""
        shown.add_row(f"{point.bits_per_weight:.2f}", size(point.nbytes), f"{point.kl:.2g}", bar + mark)
    console.print(shown)


def explained(explanation: Explanation) -> None:
    rows, cols = explanation.shape
    console.print(f"[bold]{escape(explanation.weight)}[/] ({rows} x {cols}): {escape(explanation.reason)}")
    console.print(f"  {explanation.share_of_bytes:.2%} of the plan's bytes, {explanation.share_of_kl:.2%} of its predicted KL")
    shown = new_table("what it could have had", ("format", "bytes", "KL", "more bytes", "more KL"))
    for each in explanation.alternatives:
        style = "bold" if each.chosen else None
        shown.add_row(each.format, size(each.nbytes), f"{each.kl:.2e}", f"{each.more_bytes:+,}", f"{each.more_kl:+.1e}", style=style)
    console.print(shown)
    for fmt, why in explanation.refused:
        note(f"not {fmt}: {why}")


def accumulation(errors: Accumulation) -> None:
    columns = (
        Column("up to block"), Column("weights", 3, right=True), Column("predicted", 1, right=True), Column("measured", right=True),
        Column("error of its output", 2, right=True),
    )  # fmt: skip
    cells = []
    for row in errors.rows:
        name = "embedding and output" if row.block < 0 else str(row.block)
        predicted = "" if row.predicted_so_far is None else f"{row.predicted_so_far:.5f}"
        cells.append((name, str(row.weights), predicted, f"{row.measured_so_far:.5f}", f"{row.hidden_error:.1e}"))
    title = f"errors from block to block, on {errors.tokens:,} tokens: KL of the model with everything up to here quantized"
    console.print(fitted(title, columns, cells, console.width))


def rounds(done: Sequence[Round], passed: bool, least: float) -> None:
    """`least`: the predicted KL of the best plan of these formats."""
    shown = new_table("rounds", ("round", "bytes", "predicted KL", "measured KL", "top-1", "perplexity", ""))
    for number, each in enumerate(done, 1):
        v = each.verdict
        figures = (f"{each.predicted:.4f}", f"{v.kl_mean:.4f}", f"{v.top1_agreement:.2%}", f"x {v.ppl_ratio:.4f}")
        shown.add_row(str(number), size(each.nbytes), *figures, "passed" if each.passed else "failed")
    console.print(shown)
    if passed:
        return
    if min(each.predicted for each in done) <= least * 1.01:
        note("not reachable with these formats; this is the nearest that was found")
    else:
        note(f"no plan passed in {len(done)} rounds; this is the nearest that was found. --rounds allows more")
