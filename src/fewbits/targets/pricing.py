"""The size of a plan in a target's file, to the byte, before anything is quantized; and which formats are worth measuring for a target."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from fewbits import formats, planning
from fewbits.artifact.draft import Draft
from fewbits.errors import InputError
from fewbits.formats.runtime import kv
from fewbits.planning import rules
from fewbits.planning.allocation import allocator
from fewbits.planning.decision import decide, predicted_kl, tensor_bytes
from fewbits.sensitivity import Container, Sensitivity
from fewbits.sensitivity.table import Cell, Scores

if TYPE_CHECKING:
    from fewbits.formats import Format
    from fewbits.model import Model
    from fewbits.planning import Plan
    from fewbits.planning.allocation import Allocator
    from fewbits.planning.constraints import Constraints
    from fewbits.planning.decision import Budget, Decision
    from fewbits.targets import Target

_ANY = (256, 256)  # a shape that every format fits
_FEW_BITS, _MANY_BITS = 2.5, 4.0  # per weight: plans of the latter were never seen to take formats of fewer than the former
_ACCURATE = 0.02  # KL of such plans, at the most
_MARGIN = 4096  # bytes by which the text of another plan may be longer than in the dry run
_TRIES = 8


def check_reachable(source: Model, target: Target, budget: Budget, constraints: Constraints) -> None:
    """An error if even the smallest formats exceed the budget. Shapes alone tell, so this is checked before hours of calibrating."""
    if budget.by_accuracy:
        return
    some, limit = _by_size(source, target, budget, constraints)
    if some.least_bytes > limit:
        some.within_bytes(limit, str(budget))  # raises the error


def worth_measuring(source: Model, target: Target, budget: Budget, constraints: Constraints) -> list[Format]:
    """The candidates, without formats that no plan within the budget would take: measuring one takes time."""
    every = candidates_for(source, target, constraints.formats, constraints.overrides)
    if constraints.formats or means_few_bits(source, target, budget, constraints):
        return every
    named = {rule.format for rule in rules.parse_all(constraints.overrides, source.weights)}
    return [fmt for fmt in every if fmt in named or fmt.bits_per_weight(_ANY) >= _FEW_BITS] or every


def means_few_bits(source: Model, target: Target, budget: Budget, constraints: Constraints) -> bool:
    """Whether plans within the budget are of fewer than four bits per weight."""
    if budget.by_accuracy:
        return predicted_kl(budget.limits) > _ACCURATE
    some, limit = _by_size(source, target, budget, constraints)
    return 8 * limit < _MANY_BITS * some.elements


def has_few_bits(source: Model, plan: Plan) -> bool:
    """The same of a plan; weights that stay in float are not counted."""
    rounded = [weight for weight in source.weights if not formats.get(plan[weight.name].format).is_cast]
    return 8 * sum(plan[weight.name].nbytes for weight in rounded) < _MANY_BITS * sum(math.prod(weight.shape) for weight in rounded)


def _by_size(source: Model, target: Target, budget: Budget, constraints: Constraints) -> tuple[Allocator, int]:
    """An allocator that knows the sizes of formats and no damage, and the bytes that the weights may take."""
    nothing = Cell(0.0, 0.0, "rtn", Scores(0.0, 0.0, 0.0, 0.0))
    candidates = candidates_for(source, target, constraints.formats, constraints.overrides)
    possible = {
        weight.name: [fmt for fmt in (*candidates, formats.get(weight.dtype)) if fmt.fits(weight.shape) is None]
        for weight in source.weights
    }
    rows = {name: {fmt.name: nothing for fmt in some} for name, some in possible.items()}
    table = Sensitivity(source.name, "", (), "rtn", source.weights, rows, source.config.to_dict())
    some = allocator(table, target, constraints)
    return some, tensor_bytes(table, target, budget, some.elements, 0, kv.get(constraints.kv).name if constraints.kv else None)


def candidates_for(source: Model, target: Target, names: tuple[str, ...], overrides: tuple[str, ...] = ()) -> list[Format]:
    """The formats to measure: those asked for, or else the target's candidates; and those that overrides name."""
    wanted = [formats.get(name) for name in names or target.candidates]
    wanted += [rule.format for rule in rules.parse_all(overrides, source.weights) if rule.format]
    usable = [fmt for fmt in dict.fromkeys(wanted) if any(planning.refuses(weight, target, fmt) is None for weight in source.weights)]
    if not usable:
        tried = ", ".join(fmt.name for fmt in wanted)
        raise InputError(f"none of {tried} fits a weight of this model in {target.name}", "`fewbits formats` lists what each holds")
    return usable


def with_container(table: Sensitivity, source: Model, target: Target) -> Sensitivity:
    """The table with the bytes that the target's file holds beside the weights, by a dry run of some plan."""
    some = allocator(table, target)
    plan = some.within_bytes(some.least_bytes + (some.least_bytes >> 2), "--fits 1000GB --context 1000000")
    overhead = target.overhead(Draft(source, plan)) + _MARGIN
    return replace(table, containers=table.containers | {target.name: Container(overhead)})


def within_file(table: Sensitivity, source: Model, target: Target, budget: Budget, constraints: Constraints) -> Decision:
    """A plan whose file is within the budget to the byte, checked by its own dry run."""
    overhead: int | None = None
    for _ in range(_TRIES):
        decision = decide(table, target, budget, constraints, overhead=overhead)
        if not decision.whole_file:
            return decision
        known = table.containers[target.name].overhead if overhead is None else overhead
        needed = target.overhead(Draft(source, decision.plan))
        if needed <= known:
            return decision
        overhead = needed + _MARGIN
    raise InputError(f"no plan of this size was found for {target.name}", "raise the size a little")
