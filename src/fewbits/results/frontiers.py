"""The plan at every size of the frontier: what each weight could be, once, and a choice for each weight at each size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits import formats, planning

if TYPE_CHECKING:
    from fewbits.planning import Plan
    from fewbits.planning.allocation import Allocator
    from fewbits.planning.deciding import Decision


@dataclass(frozen=True)
class Option:
    """One format for one weight."""

    format: str
    bytes: int
    kl: float


@dataclass(frozen=True)
class Point:
    bytes: int
    bits_per_weight: float
    kl: float
    choice: tuple[int, ...]  # for each weight, which of its options


@dataclass(frozen=True)
class Uniform:
    """One format for all weights, where it fits every one."""

    format: str
    bytes: int
    bits_per_weight: float
    kl: float  # predicted


@dataclass(frozen=True)
class Frontier:
    weights: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]  # of each weight: those that some point takes
    points: tuple[Point, ...]  # by rising size
    uniform: tuple[Uniform, ...]


def of(decision: Decision) -> Frontier:
    whole = decision.allocator
    names = tuple(weight.name for weight in whole.table.weights)
    options: list[dict[str, Option]] = [{} for _ in names]
    points = []
    for plan in whole.frontier_plans:
        choice = []
        for found, name in zip(options, names, strict=True):
            entry = plan[name]
            found.setdefault(entry.format, Option(entry.format, entry.nbytes, _digits(entry.kl or 0.0)))
            choice.append(list(found).index(entry.format))
        points.append(Point(plan.nbytes, _digits(plan.bits_per_weight), _digits(plan.kl or 0.0), tuple(choice)))
    return Frontier(names, tuple(tuple(found.values()) for found in options), tuple(points), _uniform(whole))


def _uniform(whole: Allocator) -> tuple[Uniform, ...]:
    """What one format for all is predicted to cost, where the table has it for every weight: the points that a plan competes with."""
    found = []
    weights = whole.table.weights
    for name in dict.fromkeys(fmt for row in whole.table.rows.values() for fmt in row):
        plan: Plan = planning.uniform(weights, whole.target, formats.get(name))
        if any(entry.format not in whole.table.rows[entry.weight] for entry in plan.entries) or any(e.fallback for e in plan.entries):
            continue
        kl = math.fsum(whole.kl(weight, formats.get(plan[weight.name].format)) for weight in weights)
        found.append(Uniform(name, plan.nbytes, _digits(plan.bits_per_weight), _digits(kl)))
    return tuple(sorted(found, key=lambda row: row.bytes))


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
