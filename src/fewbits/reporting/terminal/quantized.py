"""What `fewbits quantize` shows at its end: the plan, the methods, the rounds, the verdict and where the files are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fewbits.inspection.sizes import size_of
from fewbits.reporting.schema import predicted_as_judged
from fewbits.reporting.terminal import console, next_commands, note, plans, size, verdicts
from fewbits.targets import card

if TYPE_CHECKING:
    from fewbits.reporting.results.quantized import Quantized

_METHODS = {"gptq": "error feedback (gptq)", "rtn": "plain rounding (rtn)", "cast": "a cast to float"}
_NOTES = 8  # that are shown, and weights of each; the rest is in results.json


def show(result: Quantized) -> None:
    if result.decision:
        plans.decided(result.decision)
    else:
        plans.summary(result.plan)
    forecast = {kind.name: kind.kl for kind in result.plan.kinds}
    judged = predicted_as_judged(result.plan.kl, forecast, result.verdict) if forecast else None
    elsewhere = judged / result.plan.kl if judged and result.plan.kl else None
    _methods(result.outcomes, result.decision.allocator.runtime_kl(result.plan) if result.decision else None, elsewhere)
    _notes(result.gathered.notes if result.gathered else {})
    for remark in result.gathered.remarks if result.gathered else ():
        note(remark)
    for warning in result.coverage.warnings if result.coverage else ():
        note(warning)
    if result.rounds and result.decision:
        least = min(point.kl for point in result.decision.frontier())
        plans.rounds(result.rounds, bool(result.verdict and result.verdict.passed), least)
    if result.verdict:
        verdicts.show(result.verdict, forecast)
    console.print(f"wrote {result.path} ({size(size_of(result.path))}); artifact and plan.json in {result.artifact}/")
    console.print(f"the report: {result.artifact.parent / 'report.html'}")
    console.print(f"the model card: {card.place(result.path)}")
    if result.gathered and result.gathered.how_to_run:
        next_commands.show(result.gathered.how_to_run)


def _methods(outcomes: Mapping[str, Mapping[str, Any]], runtime: float | None, elsewhere: float | None) -> None:
    """How many weights each method got, and what choosing among methods saved on the half of the samples that was held out. `runtime`: the
    KL that the runtime's own rounding of inputs adds; `elsewhere`: how much more is expected on the text that is judged, as a factor."""
    counts = Counter(row["method"] for row in outcomes.values())
    rounding = chosen = 0.0
    for row in outcomes.values():
        damage: Mapping[str, float] = row.get("damage", {})
        if "rtn" in damage:
            rounding, chosen = rounding + damage["rtn"], chosen + min(damage.values())
    if chosen:
        methods = ", ".join(f"{_METHODS.get(name, name)} for {count} weights" for name, count in counts.most_common())
        console.print(f"rounded with {methods}")
        told = "of the weights alone" if runtime is None else f"{runtime:.5f} of it from the runtime's own rounding of activations"
        ours, plain = chosen + (runtime or 0.0), rounding + (runtime or 0.0)
        console.print(f"  predicted KL on samples held out from fitting: {ours:.5f}; with plain rounding {plain:.5f} ({told})")
        if elsewhere is not None:
            console.print(f"  on the text that it is judged on: {elsewhere * ours:.5f}")
        placed = [row["places"] for row in outcomes.values() if None not in row.get("places", {}).get("gptq", (None,))]
        for place, label in ((0, "position 0"), (1, "later positions")) if placed else ():
            fed, nearest = (sum(float(row[name][place]) for row in placed) / len(placed) for name in ("gptq", "rtn"))
            console.print(f"  held-out output error at {label}: gptq {fed:.1e}, rounding {nearest:.1e} (mean over {len(placed)} weights)")


def _notes(notes: Mapping[str, Sequence[str]]) -> None:
    for text, weights in list(notes.items())[:_NOTES]:
        more = f" and {len(weights) - _NOTES} more, in results.json" if len(weights) > _NOTES else ""
        which = weights[0] if len(weights) == 1 else f"{len(weights)} weights ({', '.join(weights[:_NOTES])}{more})"
        note(f"{which}: {text}")
    if len(notes) > _NOTES:
        note(f"and {len(notes) - _NOTES} notes more, in results.json")
