"""The model as a map: a row for each layer, a column for each of its weights, coloured by bits; one map for every stop of the slider."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fewbits.reporting.page.markup import Html, behind, figure, table, tag
from fewbits.reporting.page.words import count, kl, size
from fewbits.reporting.schema import Option, PlannedWeight, Results

_LISTED = 600  # rows of a table that is still scrolled through


@dataclass(frozen=True)
class Stop:
    """One plan that the slider can stand on."""

    bytes: int
    bits_per_weight: float
    kl: float | None
    choices: tuple[PlannedWeight | Option, ...]  # in the order of the plan's weights
    mine: bool  # it is the plan of this file
    changed: int = 0  # weights that have another format than in this file

    def said(self) -> str:
        what = "This file" if self.mine else f"{count(self.changed, 'weight')} in another format than this file"
        predicted = "" if self.kl is None else f", predicted KL {kl(self.kl)}"
        return f"{size(self.bytes)}, {self.bits_per_weight:.2f} bits per weight{predicted}. {what}."


@dataclass(frozen=True)
class Place:
    """Where a weight stands on the map."""

    part: str  # of its name, before the number of the layer: `model.layers`
    layer: int | None  # None: in no layer
    role: str  # the rest of the name, without the numbers of experts


def stops(made: Results) -> list[Stop]:
    plan, frontier = made.plan, made.frontier_plans
    here = tuple(plan.weights.values())
    known = [Stop(plan.bytes, plan.bits_per_weight, plan.predicted_kl, here, True)]
    if frontier is None:
        return known
    places = {name: index for index, name in enumerate(frontier.weights)}
    order = [places[name] for name in plan.weights]
    for point in frontier.points:
        choices = tuple(frontier.options[index][point.choice[index]] for index in order)
        if changed := sum(a.format != b.format for a, b in zip(here, choices, strict=True)):
            known.append(Stop(point.bytes, point.bits_per_weight, point.kl, choices, False, changed))
    return sorted(known, key=lambda stop: stop.bytes)


def command(made: Results, stop: Stop) -> str:
    """What makes a file of this plan's size. The size of a file is known where this one was written and run: its rest stays the same."""
    if stop.mine or not made.for_size:
        return made.reproduction.commands[0] if stop.mine and made.for_size and made.reproduction.commands else ""
    beside = made.verdict.bytes - made.plan.bytes if made.verdict else None
    wanted = f"{math.ceil(1000 * stop.bits_per_weight) / 1000:g}bpw" if beside is None else str(stop.bytes + beside)
    return made.for_size.replace("SIZE", wanted)


def place(name: str) -> Place:
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    if number is None:
        return Place("", None, name)
    role = ".".join(part for part in parts[number + 1 :] if not part.isdecimal())
    return Place(".".join(parts[:number]), int(parts[number]), role or parts[number - 1])


def data(made: Results, stops: list[Stop]) -> dict[str, Any]:
    """Weights at one place (the experts of a layer) are one cell."""
    weights = list(made.plan.weights.items())
    cells: dict[Place, list[int]] = {}
    for index, (name, _) in enumerate(weights):
        cells.setdefault(place(name), []).append(index)
    labels = _labels([where for where in cells if where.layer is not None])
    several = len({where.part for where in cells if where.layer is not None}) > 1
    known = list(dict.fromkeys(_formats(stop, members) for stop in stops for members in cells.values()))
    shown: list[dict[str, Any]] = []
    for where, members in cells.items():
        (name, first), alone = weights[members[0]], len(members) == 1
        shown.append(
            {
                "name": name if alone else f"{where.part}.{where.layer}.{where.role} ({len(members)} weights)",
                "role": labels.get(where.role, where.role.split(".")[-1]),
                "layer": _layer(where, several),
                "shape": f"{first.shape[0]:,} \u00d7 {first.shape[1]:,}",
                "elements": sum(weights[index][1].elements for index in members),
                "reason": first.reason if alone else "",
            }
        )
    return {
        "formats": known,
        "cells": shown,
        "stops": [
            {"bytes": stop.bytes, "bits": stop.bits_per_weight, "kl": stop.kl, "mine": stop.mine, "said": stop.said()}
            | {"command": command(made, stop)}
            | {"cells": [_cell(stop, members, known) for members in cells.values()]}
            for stop in stops
        ],
    }


def pictures(made: Results) -> tuple[Html, ...]:
    listed, bits = list(made.plan.weights.items()), f"{made.plan.bits_per_weight:.2f}"
    label = f"Map of {count(len(listed), 'weight')} by layer and role, {bits} bits per weight on average; the table below lists each"
    caption = "A cell is a weight; the text in it is its format. Point at it or tap it for size, predicted error and reason."
    caption += " Outlined: another format than in this file." if made.frontier else ""
    which = f"All {count(len(listed), 'weight')}"
    if len(listed) > _LISTED:
        listed = sorted(listed, key=lambda row: -(row[1].kl or 0.0))[:_LISTED]
        which = f"The {_LISTED} weights that cost most; results.json has all"
    rows = [(name, w.format, w.granularity, f"{8 * w.bytes / w.elements:.2f}", size(w.bytes), kl(w.kl), w.reason) for name, w in listed]
    columns = ("weight", "format", "scale per", "bits/weight", "bytes", "predicted KL", "why")
    return (
        tag("div", class_="scale", data_chart="bits", role="img", aria_label="Colours from 2 to 16 bits per weight"),
        figure("map", label, caption),
        behind(which, table(columns, rows, "The formats of this file, and why", (3, 4, 5))),
    )


def _cell(stop: Stop, members: list[int], formats: list[str]) -> list[Any]:
    """[which format, bytes, predicted KL]"""
    chosen = [stop.choices[index] for index in members]
    known = [choice.kl for choice in chosen if choice.kl is not None]
    cost = float(f"{sum(known):.4g}") if len(known) == len(chosen) else None
    return [formats.index(_formats(stop, members)), sum(choice.bytes for choice in chosen), cost]


def _formats(stop: Stop, members: list[int]) -> str:
    return "/".join(dict.fromkeys(stop.choices[index].format for index in members))


def _labels(places: list[Place]) -> dict[str, str]:
    """The last word of a role without `_proj`, or its last two words where two roles end alike."""
    roles = list(dict.fromkeys(where.role for where in places))
    short = {role: role.split(".")[-1].removesuffix("_proj") for role in roles}
    taken = list(short.values())
    return {role: name if taken.count(name) == 1 else ".".join(role.split(".")[-2:]) for role, name in short.items()}


def _layer(where: Place, several: bool) -> str | None:
    if where.layer is None:
        return None
    return f"{where.part.split('.')[0]} {where.layer}" if several else str(where.layer)
