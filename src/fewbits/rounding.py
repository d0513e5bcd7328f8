"""Values to codes and back: one pair of functions for every format, of (levels, scale, offset) and nothing else."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

Levels = tuple[float, ...]


def encode(w: Tensor, levels: Levels, scale: Tensor, offset: Tensor | None = None) -> Tensor:
    """The code of the level nearest to each weight. A zero scale can only say `offset`: any code would do, zero's is taken."""
    x = w if offset is None else w - offset
    return nearest(x / scale.masked_fill(scale == 0, torch.inf), levels)


def decode(codes: Tensor, levels: Levels | None, scale: Tensor, offset: Tensor | None = None) -> Tensor:
    if levels is None:
        return codes.to(torch.float32, copy=True)  # never the stored values themselves, which others read
    values = level_values(levels)[codes.int()] if first_of_consecutive(levels) is None else codes.float() + levels[0]
    values *= scale
    return values if offset is None else values.add_(offset)


def nearest(x: Tensor, levels: Levels) -> Tensor:
    first = first_of_consecutive(levels)
    if first is not None:
        return (x.round() - first).clamp_(0, len(levels) - 1).to(torch.uint8)
    dtype = _float8(levels)
    if dtype is not None:
        return _cast(x, dtype).view(torch.uint8)
    order, boundaries = sorted_codes(levels)
    return order[_passed(x, boundaries)]


def snap(x: Tensor, levels: Levels) -> Tensor:
    """The level nearest to each x itself, not its code: what a search for scales needs. Overwrites x where it can."""
    if first_of_consecutive(levels) is not None:
        return x.round_().clamp_(levels[0], levels[-1])
    dtype = _float8(levels)
    if dtype is not None:
        return _cast(x, dtype).float()
    order, boundaries = sorted_codes(levels)
    return level_values(levels)[order.int()][_passed(x, boundaries)]


@cache
def level_values(levels: Levels) -> Tensor:
    return torch.tensor(levels, dtype=torch.float32)


@cache
def first_of_consecutive(levels: Levels) -> float | None:
    """Where levels are consecutive integers, rounding is arithmetic and needs no table."""
    return levels[0] if list(levels) == [levels[0] + i for i in range(len(levels))] else None


@cache
def _float8(levels: Levels) -> torch.dtype | None:
    """Where levels are all 256 values of a float8 type, rounding is a cast: to nearest even, and it keeps the sign of a zero."""
    if len(levels) != 256:
        return None
    codes, values = torch.arange(256, dtype=torch.uint8), level_values(levels)
    types = (torch.float8_e4m3fn, torch.float8_e5m2)
    return next((dtype for dtype in types if torch.allclose(codes.view(dtype).float(), values, rtol=0, atol=0, equal_nan=True)), None)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)  # e5m2 would overflow to infinity, and e4m3 does to NaN outside of torch


@cache
def sorted_codes(levels: Levels) -> tuple[Tensor, Tensor]:
    """Codes by rising level, and where one gives way to the next. Of equal levels (0 and -0) the first code is taken; what lies
    in the middle of two goes to the even code, which is what a float of few bits calls rounding to even."""
    codes: dict[float, int] = {}
    for code, level in enumerate(levels):
        if math.isfinite(level):
            codes.setdefault(level, code)
    values = sorted(codes)
    order = torch.tensor([codes[value] for value in values], dtype=torch.uint8)
    sorted_values = torch.tensor(values, dtype=torch.float64)
    midpoints = ((sorted_values[1:] + sorted_values[:-1]) / 2).float()
    # a midpoint itself belongs to the lower level; where the upper code is even, the boundary moves just below
    upper_is_even = order[1:] % 2 == 0
    return order, torch.where(upper_is_even, midpoints.nextafter(torch.tensor(-torch.inf)), midpoints)


def _passed(x: Tensor, boundaries: Tensor) -> Tensor:
    """How many boundaries lie below each x, as an index. Up to 16 levels, counting is twice as fast as a binary search."""
    if len(boundaries) > 15:
        return torch.bucketize(x, boundaries)
    count = torch.zeros_like(x, dtype=torch.uint8)
    for boundary in boundaries.tolist():
        count += x > boundary
    return count.int()


def spread(entries: Tensor, per: int, columns: slice | Tensor) -> Tensor:
    """The entry that governs each of these columns, where one entry governs `per` columns: (rows, n)."""
    if isinstance(columns, Tensor):
        return entries[:, columns // per]
    if columns == slice(None):
        return entries.repeat_interleave(per, dim=1)
    start, stop, step = columns.indices(entries.shape[1] * per)
    if step == per and start == 0:
        return entries[:, : -(-stop // per)]
    return entries[:, torch.arange(start, stop, step) // per]
