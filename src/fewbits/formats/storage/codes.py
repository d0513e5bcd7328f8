"""Values to codes and back: `encode` and `decode` serve every format, from its levels, scale and offset alone."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

Levels = tuple[float, ...]
_FLOAT16_MAX = 65504.0


def encode(w: Tensor, levels: Levels, scale: Tensor, offset: Tensor | None = None) -> Tensor:
    """The code of the level nearest to each weight. Under a zero scale every code decodes to `offset`: the code of zero is taken."""
    return nearest(unit_values(w, scale, offset), levels)


def decode(codes: Tensor, levels: Levels | None, scale: Tensor, offset: Tensor | None = None) -> Tensor:
    if levels is None:
        return codes.to(torch.float32, copy=True)  # a copy: callers may change the result
    return scaled_values(level_of(codes, levels), scale, offset)


def unit_values(w: Tensor, scale: Tensor, offset: Tensor | None = None) -> Tensor:
    """Weights without their offset, in units of their scale; zero where the scale is zero."""
    x = w if offset is None else w - offset
    return x / scale.masked_fill(scale == 0, torch.inf)


def scaled_values(values: Tensor, scale: Tensor, offset: Tensor | None = None) -> Tensor:
    """The opposite of `unit_values`; overwrites values."""
    values *= scale
    return values if offset is None else values.add_(offset)


def level_of(codes: Tensor, levels: Levels) -> Tensor:
    return level_values(levels)[codes.int()] if first_of_consecutive(levels) is None else codes.float() + levels[0]


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
    """The level nearest to each x, instead of its code, for a search for scales. May overwrite x."""
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
    """The first level if all are consecutive integers, whose rounding needs no table; else None."""
    return levels[0] if list(levels) == [levels[0] + i for i in range(len(levels))] else None


@cache
def _float8(levels: Levels) -> torch.dtype | None:
    """The float8 type whose 256 values the levels are: rounding is then a cast, to nearest even, which keeps the sign of a zero."""
    if len(levels) != 256:
        return None
    codes, values = torch.arange(256, dtype=torch.uint8), level_values(levels)
    types = (torch.float8_e4m3fn, torch.float8_e5m2)
    return next((dtype for dtype in types if torch.allclose(codes.view(dtype).float(), values, rtol=0, atol=0, equal_nan=True)), None)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)  # else e5m2 overflows to infinity, and e4m3 to NaN


@cache
def sorted_codes(levels: Levels) -> tuple[Tensor, Tensor]:
    """Codes by rising level, and the boundaries between them. Of equal levels (0 and -0) the first code is taken; a value in the middle
    of two goes to the even code, which for small floats is rounding to nearest even."""
    codes: dict[float, int] = {}
    for code, level in enumerate(levels):
        if math.isfinite(level):
            codes.setdefault(level, code)
    values = sorted(codes)
    order = torch.tensor([codes[value] for value in values], dtype=torch.uint8)
    sorted_values = torch.tensor(values, dtype=torch.float64)
    midpoints = ((sorted_values[1:] + sorted_values[:-1]) / 2).float()
    # a boundary belongs to the lower level; where the upper code is even, it lies just below the midpoint
    upper_is_even = order[1:] % 2 == 0
    return order, torch.where(upper_is_even, midpoints.nextafter(torch.tensor(-torch.inf)), midpoints)


def _passed(x: Tensor, boundaries: Tensor) -> Tensor:
    """How many boundaries lie below each x. For up to 16 levels counting is twice as fast as a binary search."""
    if len(boundaries) > 15:
        return torch.bucketize(x, boundaries)
    count = torch.zeros_like(x, dtype=torch.uint8)
    for boundary in boundaries.tolist():
        count += x > boundary
    return count.int()


def to_float16(x: Tensor) -> Tensor:
    """Beyond its range float16 has only infinity, and one of those in a weight spoils every output: so it saturates."""
    return x.clamp(-_FLOAT16_MAX, _FLOAT16_MAX).half()


def as_float16(x: Tensor) -> Tensor:
    """What a value is once it was stored in 16 bits, as float32."""
    return to_float16(x).float()


def spread(entries: Tensor, per: int, columns: slice | Tensor) -> Tensor:
    """The entry for each of these columns, where every `per` columns share one: (rows, n)."""
    if isinstance(columns, Tensor):
        return entries[:, columns // per]
    if columns == slice(None):
        return entries.repeat_interleave(per, dim=1)
    start, stop, step = columns.indices(entries.shape[1] * per)
    if step == per and start == 0:
        return entries[:, : -(-stop // per)]
    return entries[:, torch.arange(start, stop, step) // per]
