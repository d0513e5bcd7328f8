"""A table of sensitivities and a limit in, the plan of least damage out; and the frontier of all sizes.

The KL of single weights adds up (where it is large, up to a factor that depends on the sum alone: `sensitivity/curve.py`), so the best
plan of a size is a knapsack, which `solver` solves exactly. Weights that must share a format are one item. Formats that the target cannot
store or the user excludes are no options.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from fewbits import formats, planning
from fewbits.errors import InputError
from fewbits.model.weights import TOWER
from fewbits.planning import solver, speed
from fewbits.planning.constraints import UNCONSTRAINED
from fewbits.planning.solver import Option

if TYPE_CHECKING:
    from fewbits.formats import Format
    from fewbits.model.weights import Weight
    from fewbits.planning import Entry, Plan
    from fewbits.planning.constraints import Constraints
    from fewbits.planning.rules import Rule
    from fewbits.planning.solver import Solution
    from fewbits.planning.target import Target
    from fewbits.sensitivity.table import Cell, Sensitivity


@dataclass(frozen=True)
class Choice:
    """One format for a group of weights that share it."""

    format: Format
    kl: float
    nbytes: int
    seconds: float = 0.0  # to read it for one token


@dataclass(frozen=True)
class Point:
    """One plan of the frontier."""

    nbytes: int
    bits_per_weight: float
    kl: float


@dataclass(frozen=True)
class Allocator:
    """The groups of weights and the formats that each may have: a plan for any limit is made from them."""

    table: Sensitivity
    target: Target
    groups: tuple[tuple[Weight, ...], ...]
    choices: tuple[tuple[Choice, ...], ...]  # of each group, by rising size
    rules: tuple[Rule, ...] = ()
    bandwidth: float = speed.BANDWIDTH
    min_speed: float | None = None  # tokens per second that a plan must be predicted to reach

    @cached_property
    def elements(self) -> int:
        return sum(rows * cols for rows, cols in (weight.shape for weight in self.table.weights))

    @property
    def least_bytes(self) -> int:
        return sum(choices[0].nbytes for choices in self.choices)

    @property
    def least_kl(self) -> float:
        return math.fsum(min(choice.kl for choice in choices) for choices in self.choices)

    def within_bytes(self, nbytes: int, why: str) -> Plan:
        """The plan of least KL within so many bytes."""
        solution = self._fast_enough(
            lambda toll: solver.solve(self._options(lambda c: c.kl + toll * c.seconds, lambda c: c.nbytes), nbytes)
        )
        if solution is None:
            least = f"{self.least_bytes:,} bytes, {8 * self.least_bytes / self.elements:.2f} bits per weight"
            left = f"the {nbytes:,} bytes that `{why}` leaves them" if why else f"{nbytes:,} bytes"
            hint = f"in these formats they take at least {least}: {self.least_bytes - nbytes:,} bytes more"
            raise InputError(f"{left} are too few for the weights", hint)
        return self.of(solution.chosen, why, solution.price)

    def within_kl(self, kl: float, why: str) -> Plan:
        """The smallest plan within a predicted KL."""
        limit = self.table.curve.predicted(kl)  # as a sum, before the correction for large damage
        solution = self._fast_enough(lambda toll: solver.solve(self._options(lambda c: c.nbytes + toll * c.seconds, lambda c: c.kl), limit))
        if solution is None:
            raise InputError(f"a KL of {kl:g} is not reachable: the best plan is predicted at {self.least_kl:.2g}", "allow better formats")
        return self.of(solution.chosen, why, 1 / solution.price if solution.price else 0.0)

    def runtime_kl(self, plan: Plan) -> float:
        """The part of a plan's KL that comes from the runtime's own rounding of inputs, not from its weights."""
        blocks = ((weight, self.target.activation_block(weight, formats.get(plan[weight.name].format))) for weight in self.table.weights)
        return math.fsum(self.table.runtime_kl(weight, block) for weight, block in blocks)

    def tokens_per_second(self, plan: Plan) -> float:
        taken = {entry.weight: entry for entry in plan.entries}
        each = (
            speed.seconds(weight, formats.get(taken[weight.name].format), taken[weight.name].nbytes, self.bandwidth)
            for weight in self.table.weights
        )
        return 1 / max(math.fsum(each), 1e-12)

    def _options(self, value: Callable[[Choice], float], cost: Callable[[Choice], float]) -> list[list[Option]]:
        return [[Option(value(choice), cost(choice)) for choice in choices] for choices in self.choices]

    def _fast_enough(self, solve: Callable[[float], Solution | None]) -> Solution | None:
        """The solution for the least toll (a Lagrange multiplier: cost added per second) at which the plan is fast enough, by bisection."""
        free = solve(0.0)
        if self.min_speed is None or free is None or self._seconds(free) * self.min_speed <= 1:
            return free
        low, high, best = 0.0, 1e-6, None
        while best is None:
            solution = solve(high)
            assert solution is not None, "a toll changes no cost"
            if self._seconds(solution) * self.min_speed <= 1:
                best = solution
            elif high > _LARGEST_TOLL:
                fastest = 1 / self._seconds(solution)
                raise InputError(
                    f"{self.min_speed:g} tokens/s are not reachable: {fastest:.3g} are predicted at most", "allow smaller formats"
                )
            else:
                low, high = high, high * 8
        for _ in range(_BISECTIONS):
            middle = math.sqrt(max(low, high * 1e-3) * high)
            solution = solve(middle)
            assert solution is not None
            if self._seconds(solution) * self.min_speed <= 1:
                best, high = solution, middle
            else:
                low = middle
        return best

    def _seconds(self, solution: Solution) -> float:
        return math.fsum(choices[index].seconds for choices, index in zip(self.choices, solution.chosen, strict=True))

    def repriced(self, plan: Plan) -> Plan:
        """The same formats with the KL that the table has for them; None for a format that was not measured, or not by this method."""
        entries: dict[str, Entry] = {}
        for group, choices in zip(self.groups, self.choices, strict=True):
            by_format = {choice.format.name: index for index, choice in enumerate(choices)}
            for weight in group:
                entry = plan[weight.name]
                index = by_format.get(entry.format)
                measured = self._entry(weight, choices, index, "", 0.0) if index is not None and self._measured(entry) else None
                kl, up, down = (measured.kl, measured.up, measured.down) if measured else (None, None, None)
                entries[weight.name] = replace(entry, kl=kl, up=up, down=down)
        return self._corrected(replace(plan, entries=tuple(entries[weight.name] for weight in self.table.weights)))

    def _measured(self, entry: Entry) -> bool:
        """Whether the table has this format by the method that the entry names; a cast to float is the same by every method."""
        if formats.get(entry.format).is_cast:
            return True
        return entry.method.lower() in (self.table.method, self.table.rows[entry.weight][entry.format].method)

    @cached_property
    def frontier_plans(self) -> tuple[Plan, ...]:
        """Plans at equal steps of size, from the smallest to the one that has the best quantized format for every weight."""
        most, free = sum(_best_rounded(choices).nbytes for choices in self.choices), replace(self, min_speed=None)
        steps = range(_FRONTIER)
        return tuple(free.within_bytes(self.least_bytes + (most - self.least_bytes) * step // steps[-1], "") for step in steps)

    def frontier(self) -> list[Point]:
        return [Point(plan.nbytes, plan.bits_per_weight, plan.kl or 0.0) for plan in self.frontier_plans]

    def of(self, chosen: Sequence[int], why: str, price: float = 0.0) -> Plan:
        entries = {}
        for group, choices, index in zip(self.groups, self.choices, chosen, strict=True):
            for weight in group:
                entries[weight.name] = self._entry(weight, choices, index, why, price)
        return self._corrected(planning.Plan(self.target.name, tuple(entries[weight.name] for weight in self.table.weights)))

    def _corrected(self, plan: Plan) -> Plan:
        """Large damage is not the sum of small ones: the KL of every weight is scaled so that their sum is what will be measured. And what
        that is on each kind of text."""
        ratio = self.table.curve.ratio(plan.kl or 0.0)
        if ratio != 1:
            plan = replace(plan, entries=tuple(e if e.kl is None else replace(e, kl=e.kl * ratio) for e in plan.entries))
        if plan.kl is None:
            return replace(plan, kinds=())
        kinds = (planning.OnKind(name, plan.kl * factor) for name, factor in self.table.kinds.items())
        return replace(plan, kinds=tuple(sorted(kinds, key=lambda kind: (-kind.kl, kind.name))))

    def _entry(self, weight: Weight, choices: Sequence[Choice], index: int, why: str, price: float) -> Entry:
        taken = choices[index]
        kl, nbytes = self.kl(weight, taken.format), self.target.nbytes(weight, taken.format)

        def step(choice: Choice | None) -> planning.Step | None:
            if choice is None:
                return None
            return planning.Step(
                choice.format.name, self.target.nbytes(weight, choice.format) - nbytes, self.kl(weight, choice.format) - kl
            )

        # up: the next larger format with less damage; down: the next smaller one
        up = next((c for c in choices if c.nbytes > taken.nbytes and c.kl < taken.kl), None)
        down = min((c for c in choices if c.nbytes < taken.nbytes), key=lambda c: (-c.nbytes, c.kl), default=None)
        fixed = next((rule for rule in _effective(self.rules, weight) if rule.how == "="), None)
        method = "rtn" if taken.format.is_cast else self.table.method
        if _is_unknown(self.table.rows[weight.name]):
            why, price = planning.IN_A_TOWER if weight.kind == TOWER else "calibration says nothing about it: kept as it is", 0.0
        if not self.table.predicts:
            return planning.priced(weight, self.target, taken.format, _reason(fixed, f"{why}; by weighted error", None, None, 0.0), method)
        entry = planning.priced(weight, self.target, taken.format, _reason(fixed, why, step(up), step(down), price), method)
        return replace(entry, kl=kl, up=step(up), down=step(down))

    def kl(self, weight: Weight, fmt: Format) -> float:
        return _kl(self.table, self.target, weight, fmt)


_FRONTIER = 20  # plans on it
_LARGEST_TOLL = 1e18
_BISECTIONS = 16
_LONGEST = 60  # characters of a rule in a reason: the plan is stored in the file, whose size is counted before the plan is known


def _best_rounded(choices: Sequence[Choice]) -> Choice:
    rounded = [choice for choice in choices if not choice.format.is_cast]
    return min(rounded or choices, key=lambda choice: (choice.kl, choice.nbytes))


def _reason(fixed: Rule | None, why: str, up: planning.Step | None, down: planning.Step | None, price: float) -> str:
    """The KL per kilobyte of the next better and the next smaller format, beside the price: what a kilobyte saves elsewhere."""
    if fixed:
        return f"--override {fixed.text if len(fixed.text) <= _LONGEST else fixed.text[: _LONGEST - 3] + '...'}"
    parts = [why] if why else []
    if price > 0:
        if up:
            parts.append(f"{up.format} would save {_per_kilobyte(-up.kl / up.nbytes)} KL/kB")
        if down:
            parts.append(f"{down.format} cost {_per_kilobyte(-down.kl / down.nbytes)}")
        parts.append(f"the price is {_per_kilobyte(price)}")
    return "; ".join(parts)


def _per_kilobyte(per_byte: float) -> str:
    return f"{1e3 * per_byte:.2g}"


def allocator(table: Sensitivity, target: Target, constraints: Constraints = UNCONSTRAINED) -> Allocator:
    wanted = {formats.get(name).name for name in constraints.formats}
    rules = constraints.rules_for(table.weights)
    groups: dict[str, list[Weight]] = {}
    for weight in table.weights:
        groups.setdefault(_group(weight, (*constraints.together, *target.together)), []).append(weight)
    choices = [_choices(table, target, tuple(group), wanted, rules, constraints.bandwidth) for group in groups.values()]
    members = tuple(tuple(group) for group in groups.values())
    return Allocator(table, target, members, tuple(choices), rules, constraints.bandwidth, constraints.min_speed)


def _is_unknown(cells: Mapping[str, Cell]) -> bool:
    """Whether its format was kept without measuring any."""
    return all(cell.method != "cast" and formats.get(name).is_cast for name, cell in cells.items())


def _group(weight: Weight, patterns: Sequence[str]) -> str:
    for pattern in patterns:
        if match := re.search(pattern, weight.name):
            return f"{pattern}:{match.groups()}"
    return weight.together or weight.name


def _choices(
    table: Sensitivity, target: Target, group: tuple[Weight, ...], wanted: set[str], rules: Sequence[Rule], bandwidth: float
) -> tuple[Choice, ...]:
    first = group[0]
    possible = []
    for name in table.rows[first.name]:
        fmt = formats.get(name)
        fixed = [rule for weight in group for rule in rules if rule.names(weight)]
        always = name == first.dtype or any(rule.how == "=" and rule.of(first) == fmt for rule in fixed)
        if wanted and name not in wanted and not always:
            continue
        if any(name not in table.rows[weight.name] or planning.refuses(weight, target, fmt) for weight in group):
            continue
        if all(rule.allows(weight, fmt) for weight in group for rule in _effective(rules, weight)):
            kl = math.fsum(_kl(table, target, weight, fmt) for weight in group)
            sizes = [target.nbytes(weight, fmt) for weight in group]
            time = math.fsum(speed.seconds(weight, fmt, size, bandwidth) for weight, size in zip(group, sizes, strict=True))
            possible.append(Choice(fmt, kl, sum(sizes), time))
    if not possible:
        asked = ", ".join(rule.text for rule in _effective(rules, first)) or f"--formats {','.join(sorted(wanted))}"
        known = ", ".join(name for name in table.rows[first.name] if planning.refuses(first, target, formats.get(name)) is None)
        raise InputError(f"`{first.name}` has no format left under {asked}", f"measured, and possible in {target.name}: {known}")
    return tuple(sorted(possible, key=lambda choice: (choice.nbytes, choice.kl)))


def _kl(table: Sensitivity, target: Target, weight: Weight, fmt: Format) -> float:
    """Of the weight's rounding, and of the rounding of its input that the target's runtime does for this format."""
    return table.kl(weight, fmt.name) + table.runtime_kl(weight, target.activation_block(weight, fmt))


def _effective(rules: Sequence[Rule], weight: Weight) -> list[Rule]:
    """The last rule of each kind (=, >=, <=) that names the weight. Where two contradict each other, the later one counts."""
    effective: dict[str, Rule] = {}
    for rule in rules:
        if rule.names(weight):
            if rule.how == "=":
                effective.clear()
            elif (fixed := effective.get("=")) and not rule.allows(weight, fixed.of(weight)):
                del effective["="]
            effective[rule.how] = rule
    return list(effective.values())
