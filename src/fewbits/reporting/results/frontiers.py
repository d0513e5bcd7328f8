"""The plan at every size of the frontier, and one format for all weights beside it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fewbits import formats, planning
from fewbits.reporting.schema import Frontier, FrontierPoint, Option, Uniform

if TYPE_CHECKING:
    from fewbits.planning import Plan
    from fewbits.planning.allocation import Allocator
    from fewbits.planning.decision import Decision


def of(decision: Decision) -> Frontier:
    whole = decision.allocator
    names = tuple(weight.name for weight in whole.table.weights)
    options: list[dict[str, Option]] = [{} for _ in names]
    points = []
    for plan in whole.frontier_plans:
        choice = []
        for known, name in zip(options, names, strict=True):
            entry = plan[name]
            known.setdefault(entry.format, Option(entry.format, entry.nbytes, _digits(entry.kl or 0.0)))
            choice.append(list(known).index(entry.format))
        points.append(FrontierPoint(plan.nbytes, _digits(plan.bits_per_weight), _digits(plan.kl or 0.0), tuple(choice)))
    return Frontier(names, tuple(tuple(known.values()) for known in options), tuple(points), _uniform(whole))


def _uniform(whole: Allocator) -> tuple[Uniform, ...]:
    """What one format for all is predicted to cost, of the formats that were measured for every weight."""
    uniform = []
    weights = whole.table.weights
    for name in dict.fromkeys(fmt for row in whole.table.rows.values() for fmt in row):
        plan: Plan = planning.uniform(weights, whole.target, formats.get(name))
        if any(entry.format not in whole.table.rows[entry.weight] for entry in plan.entries) or any(e.fallback for e in plan.entries):
            continue
        kl = math.fsum(whole.kl(weight, formats.get(plan[weight.name].format)) for weight in weights)
        uniform.append(Uniform(name, plan.nbytes, _digits(plan.bits_per_weight), _digits(kl)))
    return tuple(sorted(uniform, key=lambda row: row.bytes))


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
