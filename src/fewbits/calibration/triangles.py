"""Pairs of symmetric matrices, one for each half of the samples, as their upper triangles: row after row, from the diagonal on.

The second moments of a wide layer are the largest things that calibration makes. As triangles they stay in the file that they were
read from, mapped, and one square at a time is made of them, when somebody multiplies with it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_SMALL = 1024  # columns: up to here indices of all entries are the fastest way, and take little memory
_TILE = 256  # of a mirrored square: both sides of a copy stay in the cache


class Triangles:
    """Stands for a tensor (2, n, n)."""

    def __init__(self, stored: Tensor) -> None:
        """`stored` (2, n (n + 1) / 2); a ValueError says what it is instead."""
        n = (math.isqrt(8 * stored.shape[1] + 1) - 1) // 2 if stored.dim() == 2 else 0
        if stored.dim() != 2 or stored.shape != (2, n * (n + 1) // 2):
            raise ValueError(f"{tuple(stored.shape)}, which is no pair of triangles")
        self.stored, self._n = stored, n

    @property
    def shape(self) -> tuple[int, int, int]:
        return 2, self._n, self._n

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def __getitem__(self, half: int) -> Tensor:
        """(n, n), made anew: the caller may change it."""
        return square(self.stored[half])

    def total(self) -> Tensor:
        """(n, n): of both halves."""
        return square(self.stored.sum(0))

    def full(self) -> Tensor:
        return torch.stack([self[0], self[1]])

    def diagonal(self) -> Tensor:  # (2, n)
        return self.stored[:, [start(row, self._n) for row in range(self._n)]]

    # what else is asked of a tensor here and there; all of them make the whole of it
    def double(self) -> Tensor:
        return self.full().double()

    def __mul__(self, other: Any) -> Tensor:
        return self.full().mul_(other)

    def __truediv__(self, other: Any) -> Tensor:
        return self.full().div_(other)


def start(row: int, n: int) -> int:
    """Where a row of a triangle begins."""
    return row * n - row * (row - 1) // 2


def square(triangle: Tensor) -> Tensor:
    """(n (n + 1) / 2,) -> (n, n)"""
    n = (math.isqrt(8 * len(triangle) + 1) - 1) // 2
    full = triangle.new_empty(n, n)
    if n <= _SMALL:
        rows, columns = torch.triu_indices(n, n)
        full[rows, columns] = triangle
        full[columns, rows] = triangle
        return full
    at = 0
    for row in range(n):
        full[row, row:] = triangle[at : at + n - row]
        at += n - row
    upper = torch.ones(_TILE, _TILE, dtype=torch.bool).triu()
    for low in range(0, n, _TILE):
        here = slice(low, min(low + _TILE, n))
        own = full[here, here]
        own.copy_(torch.where(upper[: len(own), : len(own)], own, own.T))
        for left in range(0, low, _TILE):
            there = slice(left, left + _TILE)
            full[here, there] = full[there, here].T
    return full


def pack(pair: Tensor) -> Tensor:
    """(2, n, n), contiguous -> (2, n (n + 1) / 2). A large one in the same memory: what was there is there no longer."""
    n = pair.shape[-1]
    if n <= _SMALL:
        rows, columns = torch.triu_indices(n, n)
        return pair[:, rows, columns]
    flat = pair.view(-1)
    at = 0
    for half in range(2):
        for row in range(n):
            begin = (half * n + row) * n + row
            flat[at : at + n - row] = flat[begin : begin + n - row].clone()  # the two may overlap
            at += n - row
    return flat[:at].view(2, -1)
