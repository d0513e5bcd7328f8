"""Visiting columns one after the other: each is rounded to its target, and the ones after it are told of the error.

The inner loop over at most 128 columns knows levels, scales and offsets, so it is shared by every format; it runs natively
(kernels/native/feedback.cc) or in torch, with the same bits. Matrix products carry errors from tile to tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fewbits import kernels
from fewbits.rounding import Levels, decode, encode, level_values, nearest

WIDTH = 128  # columns of a tile at most: beyond, a matrix product is faster than the loop (kernels.h holds the same number)


@dataclass(frozen=True)
class Columns:
    """Some columns of some rows: everything is (columns, rows), contiguous; errors and codes are changed in place."""

    weights: Tensor
    errors: Tensor  # weights less what they decode to; zero where nothing was rounded yet
    codes: Tensor  # uint8
    scale: Tensor  # float32
    offset: Tensor | None

    def __getitem__(self, some: slice) -> Columns:
        offset = None if self.offset is None else self.offset[some]
        return Columns(self.weights[some], self.errors[some], self.codes[some], self.scale[some], offset)

    def tiles(self) -> list[slice]:
        cols = len(self.weights)
        return [slice(start, min(start + WIDTH, cols)) for start in range(0, cols, WIDTH)]


def feed(columns: Columns, targets: Tensor, coupling: Tensor, levels: Levels, backend: str) -> None:
    """Round for the first time. targets: what each column would best be, given the errors elsewhere; it is overwritten.
    coupling (columns, columns), lower triangular: how much an error in the second column moves the target of the first."""
    for tile in columns.tiles():
        if tile.start:
            targets[tile].addmm_(coupling[tile, : tile.start], columns.errors[: tile.start])
        _visit(columns[tile], targets[tile], coupling[tile, tile], levels, keep=False, backend=backend)


def settle(columns: Columns, coupling: Tensor, levels: Levels, backend: str) -> None:
    """Coordinate descent: visit every column again, given the errors of all the others."""
    for tile in columns.tiles():
        targets = torch.addmm(columns.weights[tile], coupling[tile], columns.errors)
        _visit(columns[tile], targets, coupling[tile, tile], levels, keep=True, backend=backend)


def _visit(columns: Columns, targets: Tensor, coupling: Tensor, levels: Levels, keep: bool, backend: str) -> None:
    """With `keep` a code is only given up for one that is nearer to the target, so that no visit does harm."""
    if backend == "reference":
        _visit_reference(columns, targets, coupling, levels, keep)
        return
    table = _table(levels)
    kernels.native().feedback(
        backend.removeprefix("native-"),
        *(array.numpy() for array in (targets, columns.weights, columns.errors, columns.codes, columns.scale)),
        None if columns.offset is None else columns.offset.numpy(),
        coupling.contiguous().numpy(),
        *(array.numpy() for array in (table.values, table.boundaries, table.codes, table.by_code)),
        table.consecutive,
        table.minus_zero,
        keep,
        torch.get_num_threads(),
    )


def _visit_reference(columns: Columns, targets: Tensor, coupling: Tensor, levels: Levels, keep: bool) -> None:
    for k in range(len(targets)):
        target, scale, offset = targets[k], columns.scale[k], None if columns.offset is None else columns.offset[k]
        codes = encode(target, levels, scale, offset)
        decoded = decode(codes, levels, scale, offset)
        error = columns.weights[k] - decoded
        if keep:
            # the present value is what its code says, not weight less error: that difference is rounded
            present = decode(columns.codes[k], levels, scale, offset)
            nearer = (target - decoded).abs() < (target - present).abs()
            codes, error = torch.where(nearer, codes, columns.codes[k]), torch.where(nearer, error, columns.errors[k])
        change = error - columns.errors[k]
        columns.codes[k], columns.errors[k] = codes, error
        # a product and a sum, each rounded: what the native loop does too
        targets[k + 1 :] += coupling[k + 1 :, k].unsqueeze(1) * change


@dataclass(frozen=True)
class _Table:
    values: Tensor  # rising
    boundaries: Tensor  # above the i-th, value i + 1 is taken
    codes: Tensor  # of each value
    by_code: Tensor  # (256,) what each code stands for
    consecutive: bool  # rounding needs no table
    minus_zero: int  # the code of -0 where rounding keeps the sign of a zero, else -1


@cache
def _table(levels: Levels) -> _Table:
    """What `rounding.nearest` does, as arrays: found by asking it, so that the native loop takes its side at every tie."""
    values = torch.tensor(sorted({level for level in levels if math.isfinite(level)}), dtype=torch.float64)
    codes = nearest(values.float(), levels)
    middle = ((values[1:] + values[:-1]) / 2).float()
    upper = nearest(middle, levels) == codes[1:]  # then the boundary lies just below
    boundaries = torch.where(upper, middle.nextafter(torch.tensor(-torch.inf)), middle)
    by_code = torch.zeros(256)
    by_code[: len(levels)] = level_values(levels)
    consecutive = list(levels) == [levels[0] + i for i in range(len(levels))]
    zero, minus_zero = nearest(torch.tensor([0.0, -0.0]), levels).tolist()
    return _Table(values.float(), boundaries, codes, by_code, consecutive, -1 if zero == minus_zero else minus_zero)
