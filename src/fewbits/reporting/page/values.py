"""How values are spread, in weights and in what they are multiplied with: the ranges that were chosen, and what lies outside."""

from __future__ import annotations

from typing import Any

from fewbits.reporting.page.contents import Distribution, Histogram, Made, Results
from fewbits.reporting.page.markup import Html, behind, figure, legend, table, tag
from fewbits.reporting.page.sections import Section
from fewbits.reporting.page.words import share, short

_DRAWN = 40  # weights: a histogram takes 1.5 kB of the page


def section(found: Results) -> Section | None:
    made = found.made
    if made is None or not made.distributions:
        return None
    known = sorted(made.distributions, key=lambda each: -_cost(made, each))
    shown = known[:_DRAWN]
    options = [tag("option", each.weight, value=index) for index, each in enumerate(shown)]
    chooser = tag("p", tag("label", "Weight ", for_="weight"), tag("select", *options, id="weight"), class_="chooser")
    more = f" Drawn are the {len(shown)} weights that cost most." if len(shown) < len(made.weights) else ""
    keys = [("before", "as they were"), ("after", "as the file has them")]
    keys += [("range", "the chosen range")] if any(each.input and each.input.chosen for each in shown) else []
    first = shown[0]
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
        {"values": [_row(each) for each in shown]},
    )


def _cost(made: Made, each: Distribution) -> float:
    return next((weight.kl or 0.0 for weight in made.weights if weight.name == each.weight), 0.0)


def _row(each: Distribution) -> dict[str, Any]:
    seen = each.input
    return {
        "name": each.weight,
        "before": _bins(each.before),
        "after": _bins(each.after),
        "input": {"values": _bins(seen.values), "chosen": seen.chosen} if seen else None,
        "said": _said(each),
        "inputSaid": _input_said(each),
    }


def _bins(histogram: Histogram) -> dict[str, Any]:
    total = max(1, sum(histogram.counts))
    return {"low": histogram.low, "high": histogram.high, "shares": [float(f"{n / total:.3g}") for n in histogram.counts]}


def _said(each: Distribution) -> str:
    said = [f"The weight, in {each.format}: {short(each.low)} to {short(each.high)}, standard deviation {short(each.std)}."]
    said.append(f"Beyond four of them lie {share(each.far, 3)} (0.006 % if they were normal)")
    if each.clipped is not None:
        said[-1] += f", outside of what the codes of their group can say {share(each.clipped, 3)}"
    said[-1] += "."
    if each.error is not None:
        said.append(f"Rounding moved it by {share(each.error, 2)} of its norm.")
    return " ".join(said)


def _input_said(each: Distribution) -> str:
    if (seen := each.input) is None:
        return "Its input was not recorded."
    chosen = (
        f"The chosen range is {short(seen.chosen[0])} to {short(seen.chosen[1])} ({seen.how})."
        if seen.chosen
        else f"No range is fixed: {seen.how}."
    )
    massive = f"{seen.massive} of {seen.channels:,} channels reach 20 times the median channel's largest value."
    return f"Its input in calibration: {short(seen.low)} to {short(seen.high)}. {massive} {chosen}"


def _table(shown: list[Distribution]) -> Html:
    rows = []
    for each in shown:
        seen = each.input
        clipped = "" if each.clipped is None else share(each.clipped, 3)
        moved = "" if each.error is None else share(each.error, 2)
        reach = f"{short(seen.low)} to {short(seen.high)}" if seen else ""
        chosen = f"{short(seen.chosen[0])} to {short(seen.chosen[1])}" if seen and seen.chosen else ""
        massive = str(seen.massive) if seen else ""
        ends = f"{short(each.low)} to {short(each.high)}"
        rows.append((each.weight, each.format, ends, share(each.far, 3), clipped, moved, reach, chosen, massive))
    columns = ("weight", "format", "values", "beyond 4 sd", "outside the codes", "moved by", "input", "chosen range", "massive channels")
    return behind("All of these as a table", table(columns, rows, "Ranges and outliers of weights and inputs", (3, 4, 5, 8)))
