"""Choosing a scale by trying a list of them: for long rows, whole weights, and scales that can take few values.

`fit_scale` tries scales that put the largest weight within a few steps of the last level. That is not enough for a row of thousands or
a whole weight, which may be best with outliers clipped to half; nor for float8, where it matters which octave the weights fall into;
nor for scales that are powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits.formats.search.groups import total
from fewbits.formats.search.integers import safe
from fewbits.formats.storage.codes import Levels, snap

if TYPE_CHECKING:
    from fewbits.formats import How

_CHUNK = 1 << 18  # weights judged at a time: a megabyte each of input and rounded values stays in cache


def best_of(x: Tensor, levels: Levels, trials: Iterable[Tensor], importance: Tensor | None = None) -> Tensor:
    """Of these scales (...), rounded as they are stored, the one with the least weighted squared error of x (..., n); else the first."""
    best, least = None, None
    for trial in trials:
        square = snap(x * inverse(trial).unsqueeze(-1), levels).mul_(trial.unsqueeze(-1)).sub_(x).square_()
        error = total(square if importance is None else square.mul_(importance), -1)
        if best is None or least is None:
            best, least = trial, error
        else:
            better = error < least
            best, least = torch.where(better, trial, best), torch.where(better, error, least)
    assert best is not None, "nothing to choose from"
    return best


def fit_row_scale(
    w: Tensor,
    levels: Levels,
    ends: tuple[float, ...],
    ratios: tuple[float, ...],
    importance: Tensor | None,
    how: How,
    store: Callable[[Tensor], Tensor],
    whole: bool = False,
) -> Tensor:
    """One scale per row of w (rows, cols), as (rows, 1), or one for all of them, as (1, 1).

    The largest weight is put at each of `ends` times each of `ratios`; the textbook puts it at the first end. importance (cols,).
    """
    chunks = w.split(max(1, _CHUNK // max(1, w.shape[1])))
    low, high = w.aminmax(dim=1, keepdim=True)
    if whole:
        low, high = low.amin(0, keepdim=True), high.amax(0, keepdim=True)
    peak = torch.where(-low > high, low, high)
    if len(ends) == 1:
        peak = peak.abs()
    textbook = store(peak / ends[0])
    if how == "max":
        return textbook

    def summed(scale: Tensor, of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:  # of(x, x decoded) -> terms (..., rows, cols)
        sums, done = [], 0
        for x in chunks:
            factor = scale if whole else scale[done : done + len(x)]
            terms = of(x, snap(x * inverse(factor), levels).mul_(factor))
            sums.append((terms if importance is None else terms.mul_(importance)).sum(-1, keepdim=True, dtype=torch.float64))
            done += len(x)
        rows = torch.cat(sums, -2)
        return rows.sum(-2, keepdim=True) if whole else rows

    wanted, most = textbook, torch.zeros_like(textbook, dtype=torch.float64)

    def consider(trial: Tensor) -> None:
        # the values v that a trial rounds to are best multiplied by sum(wxv) / sum(wvv), which lowers the error by sum(wxv)^2 / sum(wvv)
        nonlocal wanted, most
        along, size = summed(trial, lambda x, v: torch.stack([x * v, v.square_()])).unbind()
        gain = along * along / safe(size)
        better = gain > most
        wanted, most = torch.where(better, (trial * along / safe(size)).float(), wanted), torch.where(better, gain, most)

    for end in ends:
        for ratio in ratios:
            consider(peak / (end * ratio))
    for _ in range(2):
        consider(wanted)
    wanted = store(wanted)

    def error(scale: Tensor) -> Tensor:
        return summed(scale, lambda x, v: v.sub_(x).square_())

    return torch.where(error(wanted) < error(textbook), wanted, textbook)


def inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def best_line(
    x: Tensor,
    top: int,
    trials: Iterable[tuple[Tensor, Tensor]],
    store: Callable[[Tensor], Tensor],
    importance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Of these (scale, offset) the one that x (..., n) ~ scale * q + offset, q in 0..top, is nearest to once both were stored; else the
    first. After the first, each offset is also tried as the mean of what the codes of its line leave."""

    def codes(scale: Tensor, offset: Tensor) -> Tensor:
        return ((x - offset.unsqueeze(-1)) * inverse(scale).unsqueeze(-1)).round_().clamp_(0, top)

    def mean(values: Tensor) -> Tensor:
        return values.mean(-1) if importance is None else (values * importance).sum(-1) / importance.sum(-1)

    best: tuple[Tensor, Tensor] | None = None
    least = x.new_zeros(())
    for number, (slope, base) in enumerate(trials):
        scale = store(slope)
        offsets = [store(base)]
        if number:
            offsets.append(store(mean(x - codes(scale, base).mul_(scale.unsqueeze(-1)))))
        for offset in offsets:
            square = codes(scale, offset).mul_(scale.unsqueeze(-1)).add_(offset.unsqueeze(-1)).sub_(x).square_()
            error = total(square if importance is None else square.mul_(importance), -1)
            if best is None:
                best, least = (scale, offset), error
                continue
            better = error < least
            best = torch.where(better, scale, best[0]), torch.where(better, offset, best[1])
            least = torch.where(better, error, least)
    assert best is not None, "nothing to choose from"
    return best
