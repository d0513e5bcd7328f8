"""How values are spread, in weights and in what they are multiplied with: the ranges that were chosen, and what lies outside."""

from __future__ import annotations

from typing import Any

from fewbits.reporting.page.markup import Html, Section, behind, figure, legend, table, tag
from fewbits.reporting.page.words import share, short
from fewbits.reporting.schema import Distribution, Histogram, Results

_DRAWN = 40  # weights: a histogram takes 1.5 kB of the page


def section(made: Results) -> Section | None:
    if not made.distributions:
        return None
    costs = {name: weight.kl or 0.0 for name, weight in made.plan.weights.items()}
    known = sorted(made.distributions, key=lambda each: -costs.get(each.weight, 0.0))
    drawn = known[:_DRAWN]
    options = [tag("option", each.weight, value=index) for index, each in enumerate(drawn)]
    chooser = tag("p", tag("label", "Weight ", for_="weight"), tag("select", *options, id="weight"), class_="chooser")
    more = f" Drawn are the {len(drawn)} weights that cost most." if len(drawn) < len(made.plan.weights) else ""
    keys = [("before", "as they were"), ("after", "as the file has them")]
    keys += [("range", "the chosen range")] if any(each.input and each.input.chosen for each in drawn) else []
    first = drawn[0]
    pair = tag(
        "div",
        figure("weights", "Histogram of the values of the chosen weight, before and after", _said(first), said="weight-said"),
        figure("inputs", "Histogram of the values that the chosen weight is multiplied with", _input_said(first), said="input-said"),
        class_="pair",
    )
    return Section(
        "values",
        "Values and ranges",
        f"How often each value occurs, on a logarithmic scale: the flat ends are outliers, which decide how wide a range must be.{more}",
        (chooser, legend(keys), pair, _table(known)),
        {"values": [_row(each) for each in drawn]},
    )


def _row(each: Distribution) -> dict[str, Any]:
    inputs = each.input
    return {
        "name": each.weight,
        "before": _bins(each.before),
        "after": _bins(each.after),
        "input": {"values": _bins(inputs.values), "chosen": inputs.chosen} if inputs else None,
        "said": _said(each),
        "inputSaid": _input_said(each),
    }


def _bins(histogram: Histogram) -> dict[str, Any]:
    total = max(1, sum(histogram.counts))
    return {"low": histogram.low, "high": histogram.high, "shares": [float(f"{n / total:.3g}") for n in histogram.counts]}


def _said(each: Distribution) -> str:
    weight = f"The weight, in {each.format}: {_range(each.low, each.high)}, standard deviation {short(each.std)}."
    clipped = "" if each.clipped is None else f", outside of what the codes of their group can say {share(each.clipped, 3)}"
    moved = "" if each.error is None else f" Rounding moved it by {share(each.error, 2)} of its norm."
    return f"{weight} Beyond four of them lie {share(each.far, 3)} (0.006 % if they were normal){clipped}.{moved}"


def _input_said(each: Distribution) -> str:
    if (inputs := each.input) is None:
        return "Its input was not recorded."
    chosen = f"The chosen range is {_range(*inputs.chosen)} ({inputs.how})." if inputs.chosen else f"No range is fixed: {inputs.how}."
    massive = f"{inputs.massive} of {inputs.channels:,} channels reach 20 times the median channel's largest value."
    return f"Its input in calibration: {_range(inputs.low, inputs.high)}. {massive} {chosen}"


def _range(low: float, high: float) -> str:
    return f"{short(low)} to {short(high)}"


def _table(shown: list[Distribution]) -> Html:
    rows = []
    for each in shown:
        inputs = each.input
        clipped = "" if each.clipped is None else share(each.clipped, 3)
        moved = "" if each.error is None else share(each.error, 2)
        reached, massive = (_range(inputs.low, inputs.high), str(inputs.massive)) if inputs else ("", "")
        chosen = _range(*inputs.chosen) if inputs and inputs.chosen else ""
        weight = each.weight, each.format, _range(each.low, each.high), share(each.far, 3), clipped, moved
        rows.append((*weight, reached, chosen, massive))
    columns = ("weight", "format", "values", "beyond 4 sd", "outside the codes", "moved by", "input", "chosen range", "massive channels")
    return behind("All of these as a table", table(columns, rows, "Ranges and outliers of weights and inputs", (3, 4, 5, 8)))
