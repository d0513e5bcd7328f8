"""Scales for codes that stand for vectors: w ~ d * sub * point, with an odd integer `sub` for each group of a super-block.

How well a scale serves a group is asked of the codebook itself: the least error over all its points. The scales asked about lie around
the usual one for the group's root mean square; then come the integer under d, its neighbours, and least squares for d itself.
Measured on Gaussian and Student-t weights: twice as many trials, three values of d or another round lower the error by less than 1 %.

Codebooks of -1, 0 and 1 leave less to the points: there each weight's nearest level says where the integer should be as well as the points
do (errors of 0.993 to 1.001 times those with five trials of points), at a tenth of the price of one such trial; and on which side of
this integer the one neighbour lies that is tried too (at most 0.5 % more than with both).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.devices import processor
from fewbits.formats.search.groups import float16_scale, total
from fewbits.formats.search.integers import LARGEST, inverted
from fewbits.formats.storage.codebooks import LEAST_ENERGY, all_finite, native_isa, normalised

if TYPE_CHECKING:
    from fewbits.formats import Grid, How
    from fewbits.formats.storage.codebooks import Points

_LOW, _HIGH = 0.6, 1.3  # times the usual scale: scales lie between, or reach up to the largest weight
_TRIALS = {3: 5, 8: 7}  # by the number of the codebook's levels: more levels have a narrower best scale
_TRIALS_OF_LEVELS = 7  # nine are as good; the best is refined by a parabola


@dataclass(frozen=True)
class VectorSearch:
    points: Points
    group: int
    groups: int  # in a super-block
    largest: int  # of the integers
    shift: float  # of whole groups, up or down; 0: none

    def fit(self, w: Tensor, importance: Tensor | None, how: How) -> Grid:
        weight = torch.ones(w.shape[1]) if importance is None else normalised(importance)
        if how == "search" and (isa := native_isa()) is not None and w.numel() and all_finite(w):
            return self._native(isa, w.detach().float().contiguous(), weight)
        return _Rows(self, w, weight).fit(how)

    @property
    def by_levels(self) -> bool:
        """Trials look at each weight alone."""
        return self.points.signs == "in the points"

    @property
    def trials(self) -> int:
        return _TRIALS_OF_LEVELS if self.by_levels else _TRIALS[len(self.points.table.levels)]

    @property
    def shifts(self) -> tuple[float, ...]:
        """Of a vector or of its group."""
        return (self.shift, -self.shift) if self.shift else self.points.shifts or (0.0,)

    @property
    def spread(self) -> float:
        """The root mean square of the codebook's values."""
        return float(self.points.table.grid.square().mean().sqrt())

    @property
    def peak(self) -> float:
        """The scale at which a weight of 1 is the largest value."""
        return 1 / self.points.table.levels[-1]

    @property
    def native(self) -> tuple[list[int], list[float]]:
        """The sizes and the numbers that native code takes."""
        return [self.group, self.largest, self.trials, int(self.by_levels)], [self.spread, _LOW, _HIGH, self.peak, self.shift]

    def _native(self, isa: str, w: Tensor, weight: Tensor) -> Grid:
        rows, groups = len(w), w.shape[1] // self.group
        grid = {"sub": torch.empty((rows, groups), dtype=torch.int8)}
        if self.shift:
            grid["shift"] = torch.empty((rows, groups), dtype=torch.int8)
        grid["d"] = torch.empty((rows, groups // self.groups), dtype=torch.float16)
        shift: Any = grid["shift"].numpy() if self.shift else None
        arrays = w.numpy(), weight.contiguous().numpy(), grid["sub"].numpy(), shift, grid["d"].view(torch.uint16).numpy()
        processor.native().fit_vectors(isa, self.points.native, *self.native, *arrays, torch.get_num_threads())
        return grid


class _Rows:
    """Some rows, as (rows, groups of the row, vectors of the group, dimension). Native code does the same operations in the same order."""

    def __init__(self, search: VectorSearch, w: Tensor, weight: Tensor) -> None:
        self.search, self.points = search, search.points
        d = self.points.dimension
        x = w.float().clamp(-LARGEST, LARGEST).reshape(len(w), -1, search.group // d, d)
        self.weight = weight.reshape(x.shape[1:])
        self.x = self.points.sizes(x, self.weight)

    def fit(self, how: How) -> Grid:
        usual = (total((self.weight * self.x * self.x).flatten(2), 2) / total(self.weight.flatten(1).clone(), 1)).sqrt()
        usual = usual / self.search.spread
        if how == "max":
            return self.whole(usual, refine=False)
        low = usual * _LOW
        high = torch.maximum(usual * _HIGH, self.x.abs().amax((2, 3)) * self.search.peak)
        last = self.search.trials - 1
        trials = [low + (high - low) * (step / last) for step in range(last + 1)]
        if self.search.by_levels:
            return self.whole(self.lowest(trials, (high - low) * (1 / last)), refine=True)
        best, least = usual, torch.full_like(usual, torch.inf)
        for trial in trials:
            error, _ = self.tried(trial)
            better = error < least
            best, least = torch.where(better, trial, best), torch.where(better, error, least)
        return self.whole(best, refine=True)

    def lowest(self, trials: list[Tensor], step: Tensor) -> Tensor:
        """Where the parabola through the cheapest trial and its neighbours, a step away, is lowest."""
        errors = [self.error_of_levels(trial) for trial in trials]
        middle, least = trials[0], torch.full_like(step, torch.inf)
        before = after = torch.zeros_like(step)
        for i in range(1, len(trials) - 1):
            better = errors[i] < least
            pairs = (trials[i], middle), (errors[i], least), (errors[i - 1], before), (errors[i + 1], after)
            middle, least, before, after = (torch.where(better, *pair) for pair in pairs)
        bend = (before - least) + (after - least)
        away = ((before - after) / (bend + bend)).clamp(-1, 1)
        return torch.where(bend > 0, middle + away * step, middle)

    def error_of_levels(self, scale: Tensor) -> Tensor:
        """(rows, groups): if each weight gets the level nearest to it."""
        costs = [self.nearest_levels(scale, shift)[0] for shift in self.search.shifts]
        if self.search.shift:
            costs = [total(cost, 2) for cost in costs]
        least = torch.stack(costs).amin(0)
        return least if self.search.shift else total(least, 2)

    def nearest_levels(self, scale: Tensor, shift: float) -> tuple[Tensor, Tensor]:
        """The cost of each vector if each weight gets the level nearest to it, and these levels."""
        levels = [level + shift for level in self.points.table.levels]
        nearest, least = torch.full_like(self.x, levels[0]), torch.full_like(self.x, torch.inf)
        for level in levels:
            away = self.x - (scale * level)[..., None, None]
            better = away * away < least
            nearest, least = torch.where(better, level, nearest), torch.where(better, away * away, least)
        cost = self.weight * least
        summed = cost[..., 0]
        for j in range(1, self.points.dimension):
            summed = summed + cost[..., j]
        return summed, nearest

    def whole(self, wanted: Tensor, refine: bool) -> Grid:
        """Integers and d for the scales that are wanted."""
        s = self.search
        d = float16_scale(wanted.unflatten(1, (-1, s.groups)).amax(2) / s.largest)
        ratio = wanted * inverted(self._of_groups(d))
        sub = _odd(ratio, s.largest)
        error, down = self.tried(sub * self._of_groups(d))
        steps: tuple[Tensor | int, ...] = (torch.where(ratio < sub, -2, 2),) if s.by_levels else (-2, 2)
        for step in steps if refine else ():
            trial = (sub + step).clamp(1, s.largest)
            trial_error, trial_down = self.tried(trial * self._of_groups(d))
            better = trial_error < error
            sub, error, down = (torch.where(better, *pair) for pair in ((trial, sub), (trial_error, error), (trial_down, down)))
        if refine:
            d = self.refitted(sub, d, down)
        grid = {"sub": sub.to(torch.int8)}
        if s.shift:
            grid["shift"] = torch.where(down, -1, 1).to(torch.int8)
        return grid | {"d": d.half()}

    def tried(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, groups): the error of each group under this scale, and whether its points are shifted down."""
        unit = self.x * inverted(scale)[..., None, None]
        costs = self.points.rough_costs(unit, self.weight, self.search.shifts)
        if not self.search.shift:
            error = total(torch.stack(costs).amin(0), 2) * (scale * scale)
            return error, torch.zeros_like(error, dtype=torch.bool)
        error, other = (total(cost, 2) * (scale * scale) for cost in costs)
        return torch.minimum(other, error), other < error

    def refitted(self, sub: Tensor, d: Tensor, down: Tensor) -> Tensor:
        """d by least squares for what the weights become under this one."""
        scale = sub * self._of_groups(d)
        values = (self.levels_under(scale, down) if self.search.by_levels else self.points_under(scale)) * sub[..., None, None]
        along, size = (total((self.weight * one * values).flatten(2), 2) for one in (self.x, values))
        return float16_scale(self._of_blocks(along) / self._of_blocks(size).clamp(min=LEAST_ENERGY))

    def points_under(self, scale: Tensor) -> Tensor:
        unit = self.x * inverted(scale)[..., None, None]
        codes = self.points.rough_codes(unit.flatten(1, 2), self.weight.flatten(0, 1))
        return self.points.values(codes).reshape(unit.shape)

    def levels_under(self, scale: Tensor, down: Tensor) -> Tensor:
        """With the better shift of each vector, or with that of its group."""
        (cost, nearest), (other_cost, other) = (self.nearest_levels(scale, shift) for shift in self.search.shifts)
        other_is_it = down.unsqueeze(-1) if self.search.shift else other_cost < cost
        return torch.where(other_is_it.unsqueeze(-1), other, nearest)

    def _of_groups(self, by_block: Tensor) -> Tensor:
        return by_block.repeat_interleave(self.search.groups, 1)

    def _of_blocks(self, by_group: Tensor) -> Tensor:
        return total(by_group.unflatten(1, (-1, self.search.groups)).clone(), 2)


def _odd(wanted: Tensor, largest: int) -> Tensor:
    """The odd integer nearest to it, from 1 to `largest`."""
    return (((wanted - 1) / 2).clamp(max=largest).round() * 2 + 1).clamp(1, largest)
