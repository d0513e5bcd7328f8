"""Choosing scales: the searches that the formats share.

Each takes x (..., n), n weights under one scale, and an importance broadcastable to x (None: all alike), and returns the scales that
minimise sum(importance * (x - decoded)^2).

trial_points.py   which scales are tried
integers.py       16-bit integers in which trials are compared; each trial is refined by least squares for its codes
groups.py         the same weights in float32, for the final comparison
superblocks.py    the second step of K-quants, where scales are themselves rounded to integers
long_rows.py      groups of more than 256 weights, whose sums do not fit 32 bits, and levels that are not integers
trials.py         scales of whole rows and weights, and 8-bit scales: by trying a list
zeros.py          a scale and an integer zero point
native.py         calls kernels/native/search, which does the same operations in the same order and gives the same bits; torch takes
                  some fifty times as long
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits.formats.search import long_rows, native
from fewbits.formats.search.groups import FLOAT16_STEP, Groups, extreme, float16_scale, total
from fewbits.formats.search.integers import MOST, Lined, Scaled, inverted
from fewbits.formats.search.trial_points import KEPT, line_starts, scale_trials
from fewbits.formats.storage.codebooks import normalised
from fewbits.formats.storage.codes import Levels, as_float16

if TYPE_CHECKING:
    from fewbits.formats import How

__all__ = ["Groups", "fit_scale", "fit_scale_and_min", "float16_scale", "grouped", "importance_like", "in_row_chunks", "total"]

_CHUNK = 1 << 18  # weights fitted at a time
_STEPS_ALIKE = 2.0**-13  # below, float16s are 2^-24 apart, so that the next one is a noticeably different scale


def grouped(w: Tensor, group: int) -> Tensor:
    return w.reshape(w.shape[0], -1, group)


def importance_like(w: Tensor, importance: Tensor | None, group: int) -> Tensor | None:
    """A column importance (cols,) in the shape of grouped weights, normalised to mean 1 so that sums stay in range.

    A column whose inputs were always zero in calibration keeps a millionth, so that a group of such columns is still fitted to its
    weights.
    """
    if importance is None:
        return None
    if importance.shape != (w.shape[1],):
        raise ValueError(f"importance has shape {tuple(importance.shape)}, the weight has {w.shape[1]} columns")
    return normalised(importance).reshape(1, -1, group)


def fit_scale(
    x: Tensor,
    levels: Levels,
    ends: tuple[float, ...],
    importance: Tensor | None = None,
    how: How = "search",
    store: Callable[[Tensor], Tensor] = float16_scale,
) -> Tensor:
    """The scale (...) of x ~ scale * level, rounded by `store`.

    `ends` are the levels that the largest weight may be put at, the textbook one first. With both -8 and 7 the scale may be negative,
    which lets 4 symmetric bits use all 16 levels. With one end it is never negative.
    """
    as_is = native.keeps_all(store)
    trials = scale_trials(levels, ends, importance is not None, not as_is) if x.shape[-1] <= MOST and how != "max" else None
    if trials is None and how != "max":
        return long_rows.fit_scale(x, levels, ends, importance, store)
    if trials is not None and (as_is or store is float16_scale) and (fitted := native.fit_scale(x, trials, importance)) is not None:
        return fitted
    groups = Groups(x, importance)
    peak = extreme(groups.x, 0) + 0.0  # no negative zero: whether 0 or -0 counts as the largest depends on their order
    if len(ends) == 1:
        peak = peak.abs()
    textbook = peak / ends[0]
    if trials is None:
        return store(textbook).reshape(x.shape[:-1])

    # With v the levels that a trial scale rounds to, the best scale for them is sum(wxv) / sum(wvv), and it lowers the
    # error by sum(wxv)^2 / sum(wvv): a trial costs one rounding and two sums.
    scaled = Scaled.of(groups.x, groups.importance, peak, trials.steps)
    unit = scaled.sums.products.unit * inverted(scaled.sums.importance.unit)
    most = along = torch.zeros_like(peak)
    size = torch.ones_like(peak)

    def consider(trial: Tensor | int) -> None:
        nonlocal most, along, size
        trial_along, trial_size = scaled.judge(trial)
        square = trial_along * trial_along
        better = square * size > most * trial_size  # compares square / size without dividing
        most, along, size = (torch.where(better, *pair) for pair in ((square, most), (trial_along, along), (trial_size, size)))

    for place in trials.inverses:
        consider(place)
    for factor in trials.around:
        consider(scaled.inverse(along / size * unit * factor))
    wanted = torch.where(most > 0, along / size * unit, textbook)
    if as_is:
        return wanted.reshape(x.shape[:-1])
    best = store(textbook)
    error = groups.error(levels, best)
    another = torch.where(wanted.abs() < _STEPS_ALIKE, wanted + wanted.sign() * FLOAT16_STEP, wanted)
    for trial in (store(wanted), store(another)):
        trial_error = groups.error(levels, trial)
        better = trial_error < error
        best, error = torch.where(better, trial, best), torch.where(better, trial_error, error)
    return best.reshape(x.shape[:-1])


def fit_scale_and_min(
    x: Tensor,
    top: int,
    importance: Tensor | None = None,
    how: How = "search",
    float16: bool = False,
) -> tuple[Tensor, Tensor]:
    """(scale, min), both >= 0, of x ~ scale * q - min with q in 0..top. With float16 both are rounded to it, and min may be negative."""
    if how != "max" and (fitted := native.fit_scale_and_min(x, top, importance, float16)) is not None:
        return fitted
    if x.shape[-1] > MOST:
        raise ValueError(f"a minimum is searched for {MOST} weights at most, there are {x.shape[-1]}")
    groups, shape = Groups(x, importance), x.shape[:-1]
    low, high = groups.x.amin(0) + 0.0, groups.x.amax(0) + 0.0  # no negative zeros, as in fit_scale
    if not float16:
        low, high = low.clamp(max=0), high.clamp(min=0)

    def stored(scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
        return (float16_scale(scale), as_float16(minimum)) if float16 else (scale, minimum)

    textbook = stored((high - low) / top, -low + 0.0)
    if how == "max":
        return textbook[0].reshape(shape), textbook[1].reshape(shape)

    middle = (low + high) / 2 if float16 else torch.zeros_like(low)  # around it, sums of squares lose no digits to cancellation
    low, high, centred = low - middle, high - middle, groups.x - middle
    lined = Lined.of(centred, groups.importance, low, high, top)
    best_gain, best_slope, best_base = torch.full_like(low, -torch.inf), torch.zeros_like(low), torch.zeros_like(low)
    starts: list[tuple[Tensor | int, Tensor | int]] = list(line_starts(top))
    kept = [lined.start((high * above - low * below) / top, -low * below) for below, above in KEPT]
    for begin, slant in (*kept, *starts):
        # codes for the line, the least-squares line for the codes, and both once more: the second line is at least as good
        slope, base, gain = lined.fitted(*lined.next(begin, slant, float16), float16)
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_slope, best_base = torch.where(better, slope, best_slope), torch.where(better, base, best_base)
    best_scale, best_min = best_slope * lined.unit, -(best_base * lined.unit) - middle + 0.0  # no negative zero
    if float16:
        levels = tuple(float(q) for q in range(top + 1))
        best_scale, best_min = stored(best_scale, best_min)
        better = groups.error(levels, best_scale, -best_min) < groups.error(levels, textbook[0], -textbook[1])
        best_scale, best_min = torch.where(better, best_scale, textbook[0]), torch.where(better, best_min, textbook[1])
    return best_scale.reshape(shape), best_min.reshape(shape)


def in_row_chunks(fit: Callable[[Tensor], dict[str, Tensor]], w: Tensor) -> dict[str, Tensor]:
    """Fit a few rows at a time, so that the arrays of a search stay in the processor's cache: rows are independent."""
    pieces = [fit(chunk) for chunk in w.split(max(1, _CHUNK // max(1, w.shape[1])))]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
