"""Scales that are themselves small integers under one float16 per super-block: the second half of a K-quant's search.

The first half (`fewbits.formats.search`) finds the best scale and minimum of each sub-block. Here d is chosen so that integers times d
come near to all of them; then neighbours of every integer are tried, each with all codes rounded again, and d is refitted to the codes.
A step is kept only if it lowers the error, which is computed in integers (`integers.py`).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits.formats.search import native
from fewbits.formats.search.groups import Groups, extreme, float16_scale, total
from fewbits.formats.search.integers import Lined, Scaled, inverted, safe, steps_for
from fewbits.formats.storage.codes import Levels

if TYPE_CHECKING:
    from fewbits.formats import How

_ROUNDS, _LINE_ROUNDS = 1, 2  # one more gains 0.05 %, and 0.1 % with minima
# -0.5 is for a d so small that float16 has only a few steps left. For 6 bits with a sign half as many trials do as well.
_STRETCHES = (-0.5, *(k / 32 for k in range(-4, 5) if k))
_FEWER_STRETCHES = (-0.5, *(k / 16 for k in range(-2, 3) if k))
_STEPS = (-1, 1, -2, 2)
_STEPS_OF_TWO = tuple((a, b) for a in (0, -1, 1, -2, 2) for b in (0, -1, 1, -2, 2) if a or b)
_UNITS_OF_TWO = ((0.9, 1.0), (1.1, 1.0), (1.0, 0.9), (1.0, 1.1))


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
    ideal = wanted.reshape(-1, per_super)
    low, high = integers.start, integers.stop - 1
    if how == "max":
        d = float16_scale(extreme(ideal, 1) / (low if -low > high else high))
        return _rows(_integers(ideal, d, low, high), wanted, torch.int8), _rows(d, wanted, torch.float16)
    steps = steps_for(levels)
    assert steps, "sub-scales are searched for under integer levels"
    if (fitted := native.fit_sub_scales(x, steps, wanted, scale_units(per_super, low, high), importance)) is not None:
        return fitted
    groups = Groups(x, importance)
    scaled = Scaled.of(groups.x, groups.importance, extreme(groups.x, 0) + 0.0, steps)

    def attempt(sub: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        scale = sub * d.unsqueeze(-1)
        along, size = (sums.reshape(ideal.shape) for sums in scaled.at(scale.reshape(-1)))
        return sub, d, along, size, scale * (scale * size - 2 * along)

    _, size = scaled.at(wanted.reshape(-1))
    d = _best_unit(ideal, size.reshape(ideal.shape), low, high)
    best = attempt(_integers(ideal, d, low, high), d)
    for _ in range(_ROUNDS):
        centre = best[0]
        for step in _STEPS:
            trial = attempt((centre + step).clamp_(low, high), best[1])
            sub, along, size, error = _chosen(trial[-1] < best[-1], (trial[0], *trial[2:]), (best[0], *best[2:]))
            best = sub, best[1], along, size, error
        sub, d, along, size, error = best
        trial = attempt(sub, float16_scale(total(sub * along, 1) / safe(total(sub * sub * size, 1))))
        best = _chosen(_of_super(trial[-1]) < _of_super(error), trial, best)
    return _rows(best[0], wanted, torch.int8), _rows(best[1], wanted, torch.float16)


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
    ideal, ideal_min = scale.reshape(-1, per_super), minimum.reshape(-1, per_super)

    def rounded(d: Tensor, dmin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _integers(ideal, d, 0, largest), _integers(ideal_min, dmin, 0, largest), d, dmin

    def stored(sub: Tensor, sub_min: Tensor, d: Tensor, dmin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        halves = _rows(d, scale, torch.float16), _rows(dmin, scale, torch.float16)
        return _rows(sub, scale, torch.uint8), _rows(sub_min, scale, torch.uint8), *halves

    if how == "max":
        return stored(*rounded(float16_scale(ideal.amax(1) / largest), float16_scale(ideal_min.amax(1) / largest)))
    if (fitted := native.fit_sub_lines(x, top, scale, minimum, line_units(per_super, largest), importance)) is not None:
        return fitted
    groups = Groups(x, importance)
    low, high = (groups.x.amin(0) + 0.0).clamp(max=0), (groups.x.amax(0) + 0.0).clamp(min=0)
    lined = Lined.of(groups.x, groups.importance, low, high, top)
    unit = lined.unit.reshape(ideal.shape)  # of slopes: the sums are integers, each in a unit of its own
    importance_unit, product_unit = (of.unit.reshape(ideal.shape) for of in (lined.sums.importance, lined.sums.products))
    sum_w, sum_x = (sums.reshape(ideal.shape) for sums in lined.everything)

    def attempt(sub: Tensor, sub_min: Tensor, d: Tensor, dmin: Tensor) -> tuple[Tensor, ...]:
        line = sub * d.unsqueeze(-1), sub_min * dmin.unsqueeze(-1)
        sum_qx, sum_q, sum_qq = (sums.reshape(ideal.shape) for sums in lined.judge(*lined.start(*(part.reshape(-1) for part in line))))
        s, m = (part * inverted(unit) for part in line)
        error = s * (s * sum_qq - 2 * (sum_qx + m * sum_q)) + m * (m * sum_w + 2 * sum_x)
        return sub, sub_min, d, dmin, sum_qx, sum_q, sum_qq, error

    def of_super(tried: tuple[Tensor, ...]) -> Tensor:
        return total(tried[-1] * (unit * product_unit), 1)

    sum_qq = lined.judge(*lined.start(ideal.reshape(-1), ideal_min.reshape(-1)))[2].reshape(ideal.shape) * importance_unit
    d, dmin = _best_unit(ideal, sum_qq, 0, largest), _best_unit(ideal_min, sum_w * importance_unit, 0, largest)
    best = attempt(*rounded(d, dmin))
    for factor, factor_min in _UNITS_OF_TWO:
        trial = attempt(*rounded(float16_scale(d * factor), float16_scale(dmin * factor_min)))
        best = _chosen(of_super(trial) < of_super(best), trial, best)
    for _ in range(_LINE_ROUNDS):
        centre, centre_min, d, dmin, *_ = best
        for step, step_min in _STEPS_OF_TWO:
            trial = attempt((centre + step).clamp_(0, largest), (centre_min + step_min).clamp_(0, largest), d, dmin)
            chosen = _chosen(trial[-1] < best[-1], (*trial[:2], *trial[4:]), (*best[:2], *best[4:]))
            best = *chosen[:2], d, dmin, *chosen[2:]
        sub, sub_min, d, dmin, sum_qx, sum_q, sum_qq, _ = best
        sums = [*(each * importance_unit for each in (sum_qq, sum_q, sum_w)), sum_qx * product_unit, sum_x * product_unit]
        trial = attempt(sub, sub_min, *_least_squares(sub, sub_min, dmin, sums))
        best = _chosen(of_super(trial) < of_super(best), trial, best)
    return stored(*best[:4])


def _least_squares(sub: Tensor, sub_min: Tensor, dmin: Tensor, sums: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The best (d, dmin) of each super-block for x ~ d * (sub * q) - dmin * sub_min with these integers and codes; dmin as it is where
    they leave it undetermined."""
    sum_qq, sum_q, sum_w, sum_qx, sum_x = sums
    aa, ab = total(sub * sub * sum_qq, 1), -total(sub * sub_min * sum_q, 1)
    bb = total(sub_min * sub_min * sum_w, 1)
    ax, bx = total(sub * sum_qx, 1), -total(sub_min * sum_x, 1)
    determinant = aa * bb - ab * ab
    solvable = determinant > 1e-6 * aa * bb
    d = torch.where(solvable, (bb * ax - ab * bx) / safe(determinant), ax / safe(aa)).clamp(min=0)
    dmin = torch.where(solvable, (aa * bx - ab * ax) / safe(determinant), dmin).clamp(min=0)
    return float16_scale(d), float16_scale(dmin)


def _best_unit(ideal: Tensor, curvature: Tensor, low: int, high: int) -> Tensor:
    """The d whose integer multiples come nearest to the wanted scales, where missing one by e costs curvature * e^2."""
    peak = extreme(ideal, 1)
    best, least = torch.zeros_like(peak), torch.full_like(peak, torch.inf)
    for end in _ends(low, high):
        d = float16_scale(peak / end)
        for _ in range(2):
            sub = _integers(ideal, d, low, high)
            cost = total(curvature * (sub * d.unsqueeze(-1) - ideal).square(), 1)
            best, least = _chosen(cost < least, (d, cost), (best, least))
            d = float16_scale(total(curvature * sub * ideal, 1) / safe(total(curvature * sub * sub, 1)))
    return best


def _ends(low: int, high: int) -> list[float]:
    """What the largest wanted scale may become, in units of d."""
    ends, stretches = ((low, high) if low < 0 else (high,)), (_FEWER_STRETCHES if low < 0 and high < 64 else _STRETCHES)
    return [end * (1 + stretch) for end in ends for stretch in (0, *stretches)]


@cache
def scale_units(per_super: int, low: int, high: int) -> native.Units:
    """What `fit_two_level_scale` tries, for native code."""
    return native.Units("scale_units", (per_super, low, high), (tuple(_ends(low, high)), _STEPS), _ROUNDS)


@cache
def line_units(per_super: int, largest: int) -> native.Units:
    """What `fit_two_level_scale_and_min` tries, for native code."""
    factors, steps = (tuple(number for pair in pairs for number in pair) for pairs in (_UNITS_OF_TWO, _STEPS_OF_TWO))
    return native.Units("line_units", (per_super, largest), (tuple(_ends(0, largest)), factors, steps), _LINE_ROUNDS)


def _integers(ideal: Tensor, d: Tensor, low: int, high: int) -> Tensor:
    return (ideal * inverted(d).unsqueeze(-1)).round_().clamp_(low, high)


def _chosen(better: Tensor, trial: tuple[Tensor, ...], kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Entry by entry the trial where it is better; `better` is of sub-blocks, or of whole super-blocks."""
    pairs = zip(trial, kept, strict=True)
    return tuple(torch.where(better.unsqueeze(-1) if better.ndim < new.ndim else better, new, old) for new, old in pairs)


def _of_super(error: Tensor) -> Tensor:
    return total(error.clone(), 1)


def _rows(entries: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    return entries.to(dtype).reshape(len(like), -1)
