"""Pairs of symmetric matrices, one for each half of the samples, as upper triangles: row after row, each from the diagonal on.

The second moments of a wide layer are the largest tensors of calibration. As triangles they stay in the mapped file, and one full matrix
at a time is made when something multiplies with it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

SMALL_COLUMNS = 1024  # columns: up to here indexing all entries at once is fastest, and takes little memory
_TILE = 256  # rows and columns mirrored at a time: both sides of the copy fit the cache


class Triangles:
    """Stands for a tensor (2, n, n)."""

    def __init__(self, stored: Tensor) -> None:
        """`stored` is (2, n (n + 1) / 2); a ValueError says what its shape is instead."""
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
        """(n, n): a new tensor, which the caller may write to."""
        return square(self.stored[half])

    def total(self) -> Tensor:
        """(n, n): the sum of both halves."""
        return square(self.stored.sum(0))

    def full(self) -> Tensor:
        return torch.stack([self[0], self[1]])

    def diagonal(self) -> Tensor:  # (2, n)
        return self.stored[:, [start(row, self._n) for row in range(self._n)]]

    # operations of a tensor that callers use; each makes both full matrices
    def double(self) -> Tensor:
        return self.full().double()

    def __mul__(self, other: Any) -> Tensor:
        return self.full().mul_(other)

    def __truediv__(self, other: Any) -> Tensor:
        return self.full().div_(other)


def start(row: int, n: int) -> int:
    """Index in a triangle where a row begins."""
    return row * n - row * (row - 1) // 2


def square(triangle: Tensor) -> Tensor:
    """(n (n + 1) / 2,) -> (n, n)"""
    n = (math.isqrt(8 * len(triangle) + 1) - 1) // 2
    full = triangle.new_empty(n, n)
    if n <= SMALL_COLUMNS:
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
        block = full[here, here]
        block.copy_(torch.where(upper[: len(block), : len(block)], block, block.T))
        for left in range(0, low, _TILE):
            there = slice(left, left + _TILE)
            full[here, there] = full[there, here].T
    return full


def pack(pair: Tensor) -> Tensor:
    """(2, n, n), contiguous -> (2, n (n + 1) / 2). A large pair is packed in place and overwritten."""
    n = pair.shape[-1]
    if n <= SMALL_COLUMNS:
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
