"""Size against error: the best plan at every size, what competes with it, and a slider that shows each of these plans on the map."""

from __future__ import annotations

import math
from typing import Any

from fewbits.reporting.page import mapping
from fewbits.reporting.page.contents import Made, Mark, Results
from fewbits.reporting.page.markup import Html, behind, figure, joined, legend, table, tag
from fewbits.reporting.page.sections import Section
from fewbits.reporting.page.words import kl, size


def section(found: Results) -> Section | None:
    made = found.made
    if made is None:
        return None
    stops = mapping.stops(made)
    marks = _marks(found, made)
    drawn: list[Html] = []
    tables: list[Html] = []
    if made.frontier:
        drawn = [_picture(made, marks), _slider(stops)]
        tables = [_table(made, marks)]
    else:
        drawn = [tag("p", "One format or a ready plan was asked for, so that no other size was looked at.", class_="missing")]
    about = (
        "The line is the least error that the weights can have at each size, as predicted from calibration. "
        "Move the slider to see which formats each size would buy: the map follows."
        if made.frontier
        else "Which format each weight has."
    )
    points = [
        {"bytes": p.bytes, "bits": p.bits_per_weight, "kl": p.kl} for p in made.frontier if p.kl > 0
    ]  # a KL of 0 has no place on a logarithmic axis
    data: dict[str, Any] = {"frontier": {"points": points, "marks": marks}, "map": mapping.data(made, stops)}
    return Section("plan", "What each size buys", about, (*drawn, *mapping.pictures(made), *tables), data)


def _marks(found: Results, made: Made) -> list[dict[str, Any]]:
    elements = sum(weight.elements for weight in made.weights)

    def mark(kind: str, each: Mark, **more: Any) -> dict[str, Any]:
        """All on one axis: the bytes of the weights, without what lies beside them in a file."""
        row = {"kind": kind, "name": each.name, "bytes": round(each.bits_per_weight * elements / 8), "kl": each.kl}
        return row | {"bits": each.bits_per_weight} | more

    marks = [mark("uniform", each) for each in made.uniform]
    marks += [mark("peer", each) for each in found.peers]
    marks += [mark("threshold", made.threshold)] if made.threshold else []
    for number, (_, tried) in enumerate(made.rounds, 1):
        marks.append(mark("round", Mark(f"round {number}", tried.bits_per_weight, tried.kl)))
    if (verdict := made.verdict) is not None:
        this = Mark("this file", verdict.bits_per_weight, verdict.kl)
        marks.append(mark("this", this, low=verdict.kl_low, high=verdict.kl_high))
    return [row for row in marks if math.isfinite(row["kl"]) and row["kl"] > 0]


def _picture(made: Made, marks: list[dict[str, Any]]) -> Html:
    known = {row["kind"] for row in marks}
    keys = [
        ("line", "best plans, predicted", True),
        ("this", "this file, measured", "this" in known),
        ("uniform", "one format for all, predicted", "uniform" in known),
        ("threshold", "by thresholds, predicted", "threshold" in known),
        ("round", "plans tried on the way, measured", "round" in known),
        ("peer", "others, measured", "peer" in known),
    ]
    shown = legend((name, said) for name, said, here in keys if here)
    low, high = made.frontier[0], made.frontier[-1]
    label = f"Predicted KL divergence falls from {kl(low.kl)} at {size(low.bytes)} to {kl(high.kl)} at {size(high.bytes)}."
    return figure("frontier", label, "KL divergence to the original on a logarithmic scale, lower is closer; size of the weights.", shown)


def _slider(stops: list[mapping.Stop]) -> Html:
    mine = next(index for index, stop in enumerate(stops) if stop.mine)
    slider = tag(
        "input", type="range", id="size", min=0, max=len(stops) - 1, step=1, value=mine, aria_describedby="stop", list="sizes",
        aria_valuetext=stops[mine].said(),
    )  # fmt: skip
    return tag(
        "div",
        tag("label", "Size of the plan", for_="size"),
        tag(
            "div", tag("span", size(stops[0].bytes), class_="end"), slider, tag("span", size(stops[-1].bytes), class_="end"), class_="track"
        ),
        tag("output", stops[mine].said(), id="stop", for_="size", aria_live="polite"),
        tag("button", "Back to this file", type="button", id="mine", disabled=True),
        class_="slider",
    )


def _table(made: Made, marks: list[dict[str, Any]]) -> Html:
    rows = [("best plan, predicted", size(p.bytes), f"{p.bits_per_weight:.2f}", kl(p.kl)) for p in made.frontier]
    spelled = {
        "uniform": "all in {}, predicted", "threshold": "by {}, predicted", "peer": "{}, measured", "round": "{}, measured",
        "this": "{}, measured",
    }  # fmt: skip
    rows += [(spelled[m["kind"]].format(m["name"]), size(m["bytes"]), f"{m['bits']:.2f}", kl(m["kl"])) for m in marks]
    return behind(
        "These points as a table",
        joined([table(("what", "weights", "bits/weight", "KL"), rows, "Size against KL divergence", (1, 2, 3))]),
    )
