"""Scales that are themselves small integers under one float16 per super-block: the second half of a K-quant's search.

The first half (`fewbits.fitting`) says which scale and minimum each sub-block wishes for. Here d is chosen so that integers come
near to all of them; then neighbours of every integer are tried, each with all codes rounded anew, and d is refitted to the codes.
What does not lower the error of the values really stored is dropped, so that no step can do harm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits.fitting import Groups, Levels, extreme, float16_scale, inverse, safe, total

if TYPE_CHECKING:
    from fewbits.formats import How

_ROUNDS = 2  # a third gains 0.1 %
_STRETCHES = (-0.5, *(k / 32 for k in range(-4, 5) if k))  # -0.5: where d is so small that float16 has but a few steps left
_STEPS = (-1, 1, -2, 2)
_STEPS_OF_TWO = tuple((a, b) for a in (0, -1, 1, -2, 2) for b in (0, -1, 1, -2, 2) if a or b)
_UNITS_OF_TWO = tuple((a, b) for a in (1.0, 0.9, 1.1) for b in (1.0, 0.9, 1.1) if (a, b) != (1.0, 1.0))


def fit_two_level_scale(
    x: Tensor,
    levels: Levels,
    wanted: Tensor,
    per_super: int,
    integers: range,
    importance: Tensor | None = None,
    how: How = "search",
) -> tuple[Tensor, Tensor]:
    """Scales (rows, n) as small integers under one float16 per `per_super` of them: (sub int8, d float16)."""
    wish = wanted.reshape(-1, per_super)
    low, high = integers.start, integers.stop - 1
    if how == "max":
        d = float16_scale(extreme(wish, 1) / (low if -low > high else high))
        return _rows(_integers(wish, d, low, high), wanted, torch.int8), _rows(d, wanted, torch.float16)
    groups = Groups(x, importance)

    def error_of(sub: Tensor, d: Tensor) -> Tensor:
        return groups.error(levels, (sub * d.unsqueeze(-1)).reshape(-1)).reshape(wish.shape)

    v = groups.snapped(levels, wanted.reshape(-1))
    d = _best_unit(wish, groups.sum(v.square_()).reshape(wish.shape), integers)
    sub = _integers(wish, d, low, high)
    error = error_of(sub, d)
    for _ in range(_ROUNDS):
        for step in _STEPS:
            trial = (sub + step).clamp_(low, high)
            trial_error = error_of(trial, d)
            sub, error = _chosen(trial_error < error, (trial, trial_error), (sub, error))
        v = groups.snapped(levels, (sub * d.unsqueeze(-1)).reshape(-1))
        along, size = groups.sum(v * groups.x).reshape(wish.shape), groups.sum(v.square_()).reshape(wish.shape)
        trial_d = float16_scale(total(sub * along, 1) / safe(total(sub * sub * size, 1)))
        trial_error = error_of(sub, trial_d)
        d, error = _chosen(_of_super(trial_error) < _of_super(error), (trial_d, trial_error), (d, error))
    return _rows(sub, wanted, torch.int8), _rows(d, wanted, torch.float16)


def fit_two_level_scale_and_min(
    x: Tensor,
    top: int,
    scale: Tensor,
    minimum: Tensor,
    per_super: int,
    largest: int,
    importance: Tensor | None = None,
    how: How = "search",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scales and minima (rows, n) >= 0 as integers 0..largest under a float16 each: (sub, sub_min uint8, d, dmin float16)."""
    wish, wish_min = scale.reshape(-1, per_super), minimum.reshape(-1, per_super)
    levels = tuple(float(q) for q in range(top + 1))

    def rounded(d: Tensor, dmin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _integers(wish, d, 0, largest), _integers(wish_min, dmin, 0, largest), d, dmin

    def stored(sub: Tensor, sub_min: Tensor, d: Tensor, dmin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        halves = _rows(d, scale, torch.float16), _rows(dmin, scale, torch.float16)
        return _rows(sub, scale, torch.uint8), _rows(sub_min, scale, torch.uint8), *halves

    if how == "max":
        return stored(*rounded(float16_scale(wish.amax(1) / largest), float16_scale(wish_min.amax(1) / largest)))
    groups = Groups(x, importance)

    def line(sub: Tensor, sub_min: Tensor, d: Tensor, dmin: Tensor) -> tuple[Tensor, Tensor]:
        return (sub * d.unsqueeze(-1)).reshape(-1), -(sub_min * dmin.unsqueeze(-1)).reshape(-1)

    def sums(values: Tensor) -> Tensor:
        return groups.sum(values).reshape(wish.shape)

    def attempt(sub: Tensor, sub_min: Tensor, d: Tensor, dmin: Tensor) -> tuple[Tensor, ...]:
        return sub, sub_min, d, dmin, groups.error(levels, *line(sub, sub_min, d, dmin)).reshape(wish.shape)

    weight, sum_x = sums(torch.ones_like(groups.x)), sums(groups.x.clone())
    q = groups.snapped(levels, scale.reshape(-1), -minimum.reshape(-1))
    d, dmin = _best_unit(wish, sums(q.square_()), range(largest + 1)), _best_unit(wish_min, weight, range(largest + 1))
    best = attempt(*rounded(d, dmin))
    for factor, factor_min in _UNITS_OF_TWO:
        trial = attempt(*rounded(float16_scale(d * factor), float16_scale(dmin * factor_min)))
        best = _chosen(_of_super(trial[-1]) < _of_super(best[-1]), trial, best)
    for _ in range(_ROUNDS):
        for step, step_min in _STEPS_OF_TWO:
            sub, sub_min, d, dmin, error = best
            trial = attempt((sub + step).clamp_(0, largest), (sub_min + step_min).clamp_(0, largest), d, dmin)
            sub, sub_min, error = _chosen(trial[-1] < error, (trial[0], trial[1], trial[-1]), (sub, sub_min, error))
            best = sub, sub_min, d, dmin, error
        # x ~ d * (sub * q) - dmin * sub_min: two unknowns per super-block
        sub, sub_min, d, dmin, error = best
        q = groups.snapped(levels, *line(sub, sub_min, d, dmin))
        sum_qx, sum_q, sum_qq = sums(q * groups.x), sums(q.clone()), sums(q.square_())
        aa, ab, bb = total(sub * sub * sum_qq, 1), -total(sub * sub_min * sum_q, 1), total(sub_min * sub_min * weight, 1)
        ax, bx = total(sub * sum_qx, 1), -total(sub_min * sum_x, 1)
        determinant = aa * bb - ab * ab
        solvable = determinant > 1e-6 * aa * bb
        new_d = torch.where(solvable, (bb * ax - ab * bx) / safe(determinant), ax / safe(aa)).clamp(min=0)
        new_dmin = torch.where(solvable, (aa * bx - ab * ax) / safe(determinant), dmin).clamp(min=0)
        trial = attempt(sub, sub_min, float16_scale(new_d), float16_scale(new_dmin))
        best = _chosen(_of_super(trial[-1]) < _of_super(error), trial, best)
    return stored(*best[:4])


def _best_unit(wish: Tensor, curvature: Tensor, integers: range) -> Tensor:
    """The d under which integers come nearest to the scales wished for, where missing one by e costs curvature * e^2."""
    low, high = integers.start, integers.stop - 1
    peak = extreme(wish, 1)
    best, least = torch.zeros_like(peak), torch.full_like(peak, torch.inf)
    for end in (low, high) if low < 0 else (high,):
        for stretch in (0, *_STRETCHES):
            d = float16_scale(peak / (end * (1 + stretch)))
            for _ in range(2):
                sub = _integers(wish, d, low, high)
                cost = total(curvature * (sub * d.unsqueeze(-1) - wish).square(), 1)
                best, least = _chosen(cost < least, (d, cost), (best, least))
                d = float16_scale(total(curvature * sub * wish, 1) / safe(total(curvature * sub * sub, 1)))
    return best


def _integers(wish: Tensor, d: Tensor, low: int, high: int) -> Tensor:
    return (wish * inverse(d).unsqueeze(-1)).round_().clamp_(low, high)


def _chosen(better: Tensor, trial: tuple[Tensor, ...], kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Entry by entry the trial where it is better, which is said of sub-blocks or of whole super-blocks."""
    pairs = zip(trial, kept, strict=True)
    return tuple(torch.where(better.unsqueeze(-1) if better.ndim < new.ndim else better, new, old) for new, old in pairs)


def _of_super(error: Tensor) -> Tensor:
    return total(error.clone(), 1)


def _rows(entries: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    return entries.to(dtype).reshape(len(like), -1)
