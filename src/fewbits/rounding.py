"""Values to codes and back: one pair of functions for every format, of (levels, scale, offset) and nothing else."""

from __future__ import annotations

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
        return codes.float()
    values = level_values(levels)[codes.int()] if _first_of_consecutive(levels) is None else codes.float() + levels[0]
    values *= scale
    return values if offset is None else values.add_(offset)


def nearest(x: Tensor, levels: Levels) -> Tensor:
    first = _first_of_consecutive(levels)
    if first is not None:
        return (x.round() - first).clamp_(0, len(levels) - 1).to(torch.uint8)
    order, midpoints = _sorted_codes(levels)
    return order[torch.bucketize(x, midpoints)]


def snap(x: Tensor, levels: Levels) -> Tensor:
    """The level nearest to each x itself, not its code: what a search for scales needs. Overwrites x where it can."""
    if _first_of_consecutive(levels) is not None:
        return x.round_().clamp_(levels[0], levels[-1])
    return level_values(levels)[nearest(x, levels).int()]


@cache
def level_values(levels: Levels) -> Tensor:
    return torch.tensor(levels, dtype=torch.float32)


@cache
def _first_of_consecutive(levels: Levels) -> float | None:
    """Where levels are consecutive integers, rounding is arithmetic and needs no table."""
    return levels[0] if list(levels) == [levels[0] + i for i in range(len(levels))] else None


@cache
def _sorted_codes(levels: Levels) -> tuple[Tensor, Tensor]:
    values, order = level_values(levels).double().sort(stable=True)
    return order.to(torch.uint8), ((values[1:] + values[:-1]) / 2).float()


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
