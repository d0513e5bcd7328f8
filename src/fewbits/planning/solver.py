"""The multiple-choice knapsack: one option from each group, with the least total value within a limit of cost, and a proven gap.

    best = solve(groups, limit)         groups: for each weight its options, (value, cost)

Least damage for a size and least size for a damage are the same problem with value and cost exchanged. Three steps, each exact:

    1  the linear relaxation, by the lower convex hulls of the groups: a bound, a price per unit of cost, and a good first answer
    2  an option whose price-adjusted value exceeds its group's best by more than the gap between bound and answer is dropped: no better
       answer has it
    3  dynamic programming over the groups that still have a choice, without the partial answers that the bound rules out

Step 2 leaves a choice to a few dozen of a thousand weights, so step 3 takes milliseconds where a general solver takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

GAP = 1e-6  # of the value: less than any measurement resolves
_MOST_STATES = 1 << 20  # partial answers at once; beyond, the first answer is returned, with its gap
_ROUNDING = 1e-12  # of a limit: sums in another order may differ by this


class Option(NamedTuple):
    value: float  # minimised
    cost: float  # limited


@dataclass(frozen=True)
class Solution:
    chosen: tuple[int, ...]  # which option each group takes
    value: float
    cost: float
    gap: float  # proven: the least possible value is no more than this share below
    price: float = 0.0  # what one more unit of cost would save in value, about


Groups = Sequence[Sequence[Option]]
Floats = NDArray[np.float64]


def solve(groups: Groups, limit: float, gap: float = GAP) -> Solution | None:
    """None: even the cheapest options together cost more than the limit."""
    useful = [_undominated(options) for options in groups]
    least = math.fsum(groups[i][some[0]].cost for i, some in enumerate(useful))
    if least > limit:
        return None
    relaxed = _relaxation(groups, useful, limit)
    first = _of(groups, relaxed.chosen)
    worth = first.value - gap * abs(first.value)  # a better answer must be below this to be looked for
    free = _reduced(groups, useful, relaxed, worth)
    if free is None:
        return _proven(first, relaxed.bound, relaxed.price)
    better = _search(groups, free, relaxed, worth, limit)
    if better is _Abandoned:
        return _proven(first, relaxed.bound, relaxed.price)
    if better is None:  # the search was complete: no answer is below `worth`
        return _proven(first, max(relaxed.bound, worth), relaxed.price)
    assert isinstance(better, Solution)
    return _proven(better, better.value, relaxed.price)


class _Abandoned:
    """The search met too many partial answers."""


class _Relaxation(NamedTuple):
    chosen: list[int]  # a whole answer within the limit
    bound: float  # no answer is below
    price: float  # of a unit of cost, in value


def _undominated(options: Sequence[Option]) -> list[int]:
    """The options that no other one beats in both, by rising cost and falling value; of equals the first."""
    useful: list[int] = []
    for index in sorted(range(len(options)), key=lambda i: (options[i].cost, options[i].value, i)):
        if not useful or options[index].value < options[useful[-1]].value:
            useful.append(index)
    return useful


class _Step(NamedTuple):
    """From one corner of a group's hull to the next."""

    gain: float  # value saved per unit of cost
    group: int
    start: int
    stop: int


def _hull(options: Sequence[Option], some: Sequence[int]) -> list[int]:
    corners: list[int] = []
    for index in some:
        while len(corners) >= 2 and _gain(options, corners[-2], corners[-1]) <= _gain(options, corners[-1], index):
            corners.pop()
        corners.append(index)
    return corners


def _gain(options: Sequence[Option], start: int, stop: int) -> float:
    return (options[start].value - options[stop].value) / (options[stop].cost - options[start].cost)


def _relaxation(groups: Groups, useful: Sequence[Sequence[int]], limit: float) -> _Relaxation:
    """Steps by falling gain as long as they fit. The bound also takes the part that fits of the first step that does not."""
    chosen = [some[0] for some in useful]
    steps = []
    for group, some in enumerate(useful):
        corners = _hull(groups[group], some)
        steps += [_Step(_gain(groups[group], a, b), group, a, b) for a, b in pairwise(corners)]
    steps.sort(key=lambda step: -step.gain)
    room = limit * (1 - math.copysign(_ROUNDING, limit)) - math.fsum(groups[i][index].cost for i, index in enumerate(chosen))
    price, bound = 0.0, None
    for step in steps:
        options = groups[step.group]
        if chosen[step.group] != step.start:
            continue  # an earlier step of this group did not fit
        more = options[step.stop].cost - options[step.start].cost
        if more <= room:
            chosen[step.group], room = step.stop, room - more
        elif bound is None:
            price = step.gain
            bound = math.fsum(groups[i][index].value for i, index in enumerate(chosen)) - step.gain * max(room, 0.0)
    whole = math.fsum(groups[i][index].value for i, index in enumerate(chosen))
    return _Relaxation(chosen, whole if bound is None else bound, price)


def _priced(option: Option, price: float) -> float:
    return option.value + price * option.cost


def _reduced(groups: Groups, useful: Sequence[Sequence[int]], relaxed: _Relaxation, worth: float) -> list[list[int]] | None:
    """The options that an answer below `worth` may take; None: there is no such answer."""
    if relaxed.bound >= worth:
        return None
    free = []
    for options, some in zip(groups, useful, strict=True):
        best = min(_priced(options[i], relaxed.price) for i in some)
        free.append([i for i in some if relaxed.bound + _priced(options[i], relaxed.price) - best < worth + _ROUNDING * abs(worth)])
    return free


def _search(
    groups: Groups, free: Sequence[Sequence[int]], relaxed: _Relaxation, worth: float, limit: float
) -> Solution | type[_Abandoned] | None:
    """The least of all answers below `worth`, group by group; a partial answer is its value, its cost and where it came from."""
    options = [groups[i] for i in range(len(groups))]
    cheapest = np.array([min(o[i].cost for i in some) for o, some in zip(options, free, strict=True)])
    best = np.array([min(_priced(o[i], relaxed.price) for i in some) for o, some in zip(options, free, strict=True)])
    order = sorted(range(len(groups)), key=lambda g: (len(free[g]), g))
    values, costs = np.zeros(1), np.zeros(1)
    trail: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
    cost_left, priced_left = float(cheapest.sum()), float(best.sum())
    within = limit * (1 - math.copysign(_ROUNDING, limit)) if limit else limit
    for group in order:
        cost_left, priced_left = cost_left - cheapest[group], priced_left - best[group]
        some = free[group]
        added = np.array([options[group][i] for i in some], dtype=np.float64)  # (options, 2)
        new_values = (values[:, None] + added[:, 0]).ravel()
        new_costs = (costs[:, None] + added[:, 1]).ravel()
        bound = new_values + relaxed.price * new_costs + priced_left - relaxed.price * limit
        slack = _ROUNDING * (abs(worth) + relaxed.price * abs(limit))
        alive = np.flatnonzero((new_costs + cost_left <= within + _ROUNDING * abs(limit)) & (bound < worth + slack))
        alive = alive[np.lexsort((new_values[alive], new_costs[alive]))]
        falling = new_values[alive]
        lowest = np.minimum.accumulate(falling)
        better = np.ones(len(alive), dtype=bool)
        better[1:] = falling[1:] < lowest[:-1]
        alive = alive[better]
        if len(alive) == 0:
            return None
        if len(alive) > _MOST_STATES:
            return _Abandoned
        trail.append((alive // len(some), np.array(some)[alive % len(some)]))
        values, costs = new_values[alive], new_costs[alive]
    for last in np.argsort(values, kind="stable"):
        chosen, state = [0] * len(groups), int(last)
        for group, (parents, taken) in zip(reversed(order), reversed(trail), strict=True):
            chosen[group], state = int(taken[state]), int(parents[state])
        solution = _of(groups, chosen)
        if solution.cost <= limit and solution.value < worth:
            return solution
    return None


def _of(groups: Groups, chosen: Sequence[int]) -> Solution:
    taken = [options[index] for options, index in zip(groups, chosen, strict=True)]
    return Solution(tuple(chosen), math.fsum(option.value for option in taken), math.fsum(option.cost for option in taken), 0.0)


def _proven(solution: Solution, bound: float, price: float) -> Solution:
    above = solution.value - bound
    return replace(solution, gap=above / abs(solution.value) if above > 0 else 0.0, price=price)
