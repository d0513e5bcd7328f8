"""Choosing scales: the searches that the formats share.

Each takes x (..., n): n weights under one scale, and an importance broadcastable to x (None: all alike), and
minimises sum(importance * (x - decoded)^2). Trial scales come from where the largest weight may be put (`places`); each is refined
by least squares for its own codes. Trials are judged in integers (`integers`). Where they can, native/quantize*.inc do the same
operations in the same order, and so give the same bits: torch takes some fifty times as long.
`superblocks` goes on from there where scales are themselves rounded to integers; `long_rows` has the groups whose sums 32 bits do
not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits.fitting import long_rows, native
from fewbits.fitting.groups import FLOAT16_STEP, Groups, Levels, as_float16, extreme, float16_scale, total
from fewbits.fitting.integers import MOST, Lined, Scaled, inverted, safe
from fewbits.fitting.places import KEPT, line_starts, scale_trials

if TYPE_CHECKING:
    from fewbits.formats import How

__all__ = [
    "Groups",
    "as_float16",
    "extreme",
    "fit_scale",
    "fit_scale_and_min",
    "float16_scale",
    "grouped",
    "importance_like",
    "in_row_chunks",
    "inverted",
    "safe",
    "total",
]

_STEPS_ALIKE = 2.0**-13  # below, float16s are 2^-24 apart, and the next one is another scale


def grouped(w: Tensor, run: int) -> Tensor:
    return w.reshape(w.shape[0], -1, run)


def importance_like(w: Tensor, importance: Tensor | None, run: int) -> Tensor | None:
    """A column importance (cols,) in the shape of grouped weights, normalised so that sums stay in range.

    A column that calibration never saw in use keeps a millionth, so that a group of such columns is still fitted to its weights.
    """
    if importance is None:
        return None
    if importance.shape != (w.shape[1],):
        raise ValueError(f"importance has shape {tuple(importance.shape)}, the weight has {w.shape[1]} columns")
    mean = importance.float().mean()
    return (importance.float() / mean if mean > 0 else torch.ones_like(importance)).clamp(min=1e-6).reshape(1, -1, run)


def fit_scale(
    x: Tensor,
    levels: Levels,
    ends: tuple[float, ...],
    importance: Tensor | None = None,
    how: How = "search",
    store: Callable[[Tensor], Tensor] = float16_scale,
) -> Tensor:
    """The scale (...) of x ~ scale * level, as `store` keeps it.

    `ends` are the levels that the largest weight may be put at, the textbook one first. With both -8 and 7 the scale may
    turn out negative: that is how 4 symmetric bits get to use all 16 levels. With one end it never does.
    """
    as_is = native.keeps_all(store)
    trials = scale_trials(levels, ends, importance is not None, not as_is) if x.shape[-1] <= MOST and how != "max" else None
    if trials is None and how != "max":
        return long_rows.fit_scale(x, levels, ends, importance, store)
    if trials is not None and (as_is or store is float16_scale) and (found := native.fit_scale(x, trials, importance)) is not None:
        return found
    groups = Groups(x, importance)
    peak = extreme(groups.x, 0) + 0.0  # no negative zero: which of two zeros is the largest is chance
    if len(ends) == 1:
        peak = peak.abs()
    textbook = peak / ends[0]
    if trials is None:
        return store(textbook).reshape(x.shape[:-1])

    # With v the levels that a trial scale rounds to, the best scale for them is sum(wxv) / sum(wvv), and it lowers the
    # error by sum(wxv)^2 / sum(wvv): one rounding and two sums judge a trial, and no second rounding is needed.
    scaled = Scaled.of(groups.x, groups.importance, peak, trials.steps)
    unit = scaled.sums.products.unit * inverted(scaled.sums.importance.unit)
    most = along = torch.zeros_like(peak)
    size = torch.ones_like(peak)

    def consider(trial: Tensor | int) -> None:
        nonlocal most, along, size
        trial_along, trial_size = scaled.judge(trial)
        square = trial_along * trial_along
        better = square * size > most * trial_size  # a comparison of two quotients
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
    """(scale, min), both >= 0, of x ~ scale * q - min with q in 0..top. With float16, as it keeps them, and min of any sign."""
    if how != "max" and (found := native.fit_scale_and_min(x, top, importance, float16)) is not None:
        return found
    if x.shape[-1] > MOST:
        raise ValueError(f"a minimum is searched for {MOST} weights at most, there are {x.shape[-1]}")
    groups, shape = Groups(x, importance), x.shape[:-1]
    low, high = groups.x.amin(0) + 0.0, groups.x.amax(0) + 0.0  # no negative zeros: which of two zeros is the least is chance
    if not float16:
        low, high = low.clamp(max=0), high.clamp(min=0)

    def stored(scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
        return (float16_scale(scale), as_float16(minimum)) if float16 else (scale, minimum)

    textbook = stored((high - low) / top, -low + 0.0)
    if how == "max":
        return textbook[0].reshape(shape), textbook[1].reshape(shape)

    middle = (low + high) / 2 if float16 else torch.zeros_like(low)  # sums of squares around it do not cancel
    low, high, centred = low - middle, high - middle, groups.x - middle
    lined = Lined.of(centred, groups.importance, low, high, top)
    best_gain, best_slope, best_base = torch.full_like(low, -torch.inf), torch.zeros_like(low), torch.zeros_like(low)
    starts: list[tuple[Tensor | int, Tensor | int]] = list(line_starts(top))
    kept = [lined.start((high * above - low * below) / top, -low * below) for below, above in KEPT]
    for begin, slant in (*kept, *starts):
        # codes for the line, the least-squares line for the codes, and once more: the second is at least as good
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


def in_row_chunks(fit: Callable[[Tensor], dict[str, Tensor]], w: Tensor, elements: int = 1 << 18) -> dict[str, Tensor]:
    """Fit a few rows at a time, so that the arrays of a search stay in the cache: rows are independent."""
    rows = max(1, elements // max(1, w.shape[1]))
    pieces = [fit(chunk) for chunk in w.split(rows)]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
