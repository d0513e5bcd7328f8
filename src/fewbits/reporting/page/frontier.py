"""Size against error: the best plan at every size, what competes with it, and a slider that shows each of these plans on the map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fewbits.reporting.page import model_map
from fewbits.reporting.page.contents import Mark
from fewbits.reporting.page.markup import Html, Section, behind, figure, legend, table, tag
from fewbits.reporting.page.words import kl, size
from fewbits.reporting.schema import Results

_LEGEND = (
    ("line", "best plans, predicted"), ("this", "this file, measured"), ("uniform", "one format for all, predicted"),
    ("threshold", "by thresholds, predicted"), ("round", "plans tried on the way, measured"), ("peer", "others, measured"),
)  # fmt: skip


def section(made: Results, peers: Sequence[Mark]) -> Section:
    stops = model_map.stops(made)
    marks = _marks(made, peers)
    body = list(model_map.pictures(made))
    if made.frontier:
        about = "The line is the least error that the weights can have at each size, as predicted from calibration. "
        about += "Move the slider to see which formats each size would buy: the map follows."
        body = [_picture(made, marks), _slider(made, stops), *body, _table(made, marks)]
    else:
        about = "Which format each weight has."
        body.insert(0, tag("p", "One format or a ready plan was asked for, so that no other size was looked at.", class_="missing"))
    # a KL of 0 has no place on a logarithmic axis
    points = [{"bytes": p.bytes, "bits": p.bits_per_weight, "kl": p.kl} for p in made.frontier if p.kl > 0]
    data = {"frontier": {"points": points, "marks": marks}, "map": model_map.data(made, stops)}
    return Section("plan", "What each size buys", about, tuple(body), data)


def _marks(made: Results, peers: Sequence[Mark]) -> list[dict[str, Any]]:
    elements = made.plan.elements

    def mark(kind: str, name: str, bits: float, kl: float, **more: float) -> dict[str, Any]:
        """All on one axis: the bytes of the weights, without what lies beside them in a file."""
        return {"kind": kind, "name": name, "bytes": round(bits * elements / 8), "kl": kl, "bits": bits, **more}

    uniform = made.frontier_plans.uniform if made.frontier_plans else ()
    marks = [mark("uniform", each.format, each.bits_per_weight, each.kl) for each in uniform]
    marks += [mark("peer", *each) for each in peers]
    if (simple := made.decision.threshold_plan) and simple.kl is not None:
        marks.append(mark("threshold", "thresholds", 8 * simple.bytes / elements, simple.kl))
    for number, tried in enumerate(made.rounds, 1):
        marks.append(mark("round", f"round {number}", tried.verdict.bits_per_weight, tried.verdict.kl_mean))
    if (verdict := made.verdict) is not None:
        low, high = verdict.kl_ci95
        marks.append(mark("this", "this file", verdict.bits_per_weight, verdict.kl_mean, low=low, high=high))
    return [row for row in marks if math.isfinite(row["kl"]) and row["kl"] > 0]


def _picture(made: Results, marks: list[dict[str, Any]]) -> Html:
    kinds = {"line", *(row["kind"] for row in marks)}
    shown = legend((kind, said) for kind, said in _LEGEND if kind in kinds)
    low, high = made.frontier[0], made.frontier[-1]
    label = f"Predicted KL divergence falls from {kl(low.kl)} at {size(low.bytes)} to {kl(high.kl)} at {size(high.bytes)}."
    return figure("frontier", label, "KL divergence to the source on a logarithmic scale, lower is closer; size of the weights.", shown)


def _slider(made: Results, stops: list[model_map.Stop]) -> Html:
    mine = next(index for index, stop in enumerate(stops) if stop.mine)
    slider = tag(
        "input", type="range", id="size", min=0, max=len(stops) - 1, step=1, value=mine, aria_describedby="stop", list="sizes",
        aria_valuetext=stops[mine].said(),
    )  # fmt: skip
    smallest, largest = (tag("span", size(stop.bytes), class_="end") for stop in (stops[0], stops[-1]))
    return tag(
        "div",
        tag("label", "Size of the plan", for_="size"),
        tag("div", smallest, slider, largest, class_="track"),
        tag("output", stops[mine].said(), id="stop", for_="size", aria_live="polite"),
        tag("button", "Back to this file", type="button", id="mine", disabled=True),
        *_command(model_map.command(made, stops[mine])),
        class_="slider",
    )


def _command(said: str) -> tuple[Html, ...]:
    """What makes a file of the size under the slider; the script changes it."""
    return (tag("pre", tag("code", said, id="command"), tabindex=0, aria_label="The command for this size"),) if said else ()


def _table(made: Results, marks: list[dict[str, Any]]) -> Html:
    rows = [("best plan, predicted", size(p.bytes), f"{p.bits_per_weight:.2f}", kl(p.kl)) for p in made.frontier]
    predicted = {"uniform": "all in {}, predicted", "threshold": "by {}, predicted"}
    rows += [(predicted.get(m["kind"], "{}, measured").format(m["name"]), size(m["bytes"]), f"{m['bits']:.2f}", kl(m["kl"])) for m in marks]
    shown = table(("what", "weights", "bits/weight", "KL"), rows, "Size against KL divergence", (1, 2, 3))
    return behind("These points as a table", shown)
