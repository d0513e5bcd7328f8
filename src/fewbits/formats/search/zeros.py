"""Choosing a scale and an integer zero point: x ~ scale * (q - zero), q and zero in 0..top.

Zero is always exact: the grid reaches `zero` steps below it and `top - zero` above.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits.formats.search.integers import safe
from fewbits.formats.search.trials import inverse
from fewbits.formats.storage.codes import as_float16

if TYPE_CHECKING:
    from fewbits.formats import How

_STRETCHES = (-0.6, 0.0, 0.4, 0.8, 1.3, 1.8, 2.4)  # by how many steps the range of the weights exceeds the grid
_CLIPS = (1.2, 1.4, 1.65, 2.0, 2.5)  # how many times as wide it is, in long rows: their outliers are clipped


def fit_scale_and_zero(x: Tensor, top: int, importance: Tensor | None = None, how: How = "search") -> tuple[Tensor, Tensor]:
    """(scale rounded to float16, zero), both (...) float32, of x (..., n)."""
    low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    span = high - low
    textbook = as_float16(span / top)
    first = _rounded(-low * inverse(textbook), top)
    if how == "max":
        return textbook, first

    # As in fit_scale: for the values v that a trial rounds to, the best scale is sum(wxv) / sum(wvv), and it lowers the error
    # by sum(wxv)^2 / sum(wvv). A zero point only moves the ends at which rounded values are clipped, so three of them share one rounding.
    weighted = x if importance is None else x * importance
    scale, zero, most = textbook, first, torch.zeros_like(textbook)

    def consider(trial: Tensor, middle: Tensor) -> None:
        nonlocal scale, zero, most
        steps = (x * inverse(trial).unsqueeze(-1)).round_()
        for shift in (-1.0, 0.0, 1.0):
            z = (middle + shift).clamp(0, top)
            v = steps.clamp(-z.unsqueeze(-1), (top - z).unsqueeze(-1))
            along = (weighted * v).sum(-1)
            size = (v.square_() if importance is None else v.square_().mul_(importance)).sum(-1)
            gain = along * along / safe(size)
            better = gain > most
            scale, zero = torch.where(better, along / safe(size), scale), torch.where(better, z, zero)
            most = torch.where(better, gain, most)

    widths = [top + stretch for stretch in _STRETCHES] + [top * clip for clip in _CLIPS if x.shape[-1] > 256]
    for width in widths:
        trial = span / width
        cut = (width - top) / 2  # clipped at both ends by the same number of steps
        consider(trial, _rounded(-low * inverse(trial) - cut, top))
    for _ in range(2):
        consider(scale, zero)

    scale = as_float16(scale)
    better = _error(x, top, importance, scale, zero) < _error(x, top, importance, textbook, first)
    return torch.where(better, scale, textbook), torch.where(better, zero, first)


def _rounded(zero: Tensor, top: int) -> Tensor:
    return zero.round().clamp(0, top)


def _error(x: Tensor, top: int, importance: Tensor | None, scale: Tensor, zero: Tensor) -> Tensor:
    v = (x * inverse(scale).unsqueeze(-1)).round_().clamp(-zero.unsqueeze(-1), (top - zero).unsqueeze(-1))
    square = v.mul_(scale.unsqueeze(-1)).sub_(x).square_()
    return (square if importance is None else square.mul_(importance)).sum(-1)
