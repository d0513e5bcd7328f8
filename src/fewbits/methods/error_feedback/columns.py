"""Visiting columns one after the other: each is rounded to its target, and its error moves the targets of those after it.

The inner loop over at most 128 columns needs only codebook, scales and offsets, so every format shares it; it runs natively
(kernels/native/search/error_feedback.cc) or in torch, with the same bits. Products (`product.py`) carry errors from tile to tile. Where
codes stand for vectors, a visit is to a vector of columns (`vectors.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fewbits.devices import processor
from fewbits.formats.storage import codebooks
from fewbits.formats.storage.codebooks import Codebook, Points
from fewbits.formats.storage.codes import Levels, decode, encode, first_of_consecutive, level_values, nearest, scaled_values
from fewbits.methods.error_feedback import vectors
from fewbits.methods.error_feedback.product import added

WIDTH = 128  # most columns of a tile: beyond, a matrix product is faster than the loop (search/feedback.h holds the same number)


@dataclass(frozen=True)
class Columns:
    """Some columns of some rows. Every tensor is (columns, rows) and contiguous; errors and codes are changed in place."""

    weights: Tensor
    errors: Tensor  # weight minus decoded value; zero where nothing was rounded yet
    codes: Tensor  # uint8; or int32, (columns / dimension, rows)
    scale: Tensor  # float32
    offset: Tensor | None

    def __getitem__(self, some: slice) -> Columns:
        offset = None if self.offset is None else self.offset[some]
        dimension = len(self.weights) // len(self.codes)
        codes = self.codes[slice(some.start // dimension, some.stop // dimension)]
        return Columns(self.weights[some], self.errors[some], codes, self.scale[some], offset)

    def decoded(self, codebook: Codebook) -> Tensor:
        return scaled_values(codebook.values(self.codes.T).T.contiguous(), self.scale, self.offset)

    def tiles(self) -> list[slice]:
        cols = len(self.weights)
        return [slice(start, min(start + WIDTH, cols)) for start in range(0, cols, WIDTH)]


def feed(columns: Columns, targets: Tensor, coupling: Tensor, metric: Tensor | None, codebook: Codebook, isa: str | None) -> None:
    """Round for the first time. targets: the best real value of each column, given the errors in other columns; it is overwritten.
    coupling (columns, columns), lower triangular: row i, column j says how far an error in column j moves the target of column i.
    metric (columns, dimension): what errors inside a vector cost; None: codes stand for single columns."""
    for tile in columns.tiles():
        if tile.start:
            targets[tile] = added(targets[tile], coupling[tile, : tile.start], columns.errors[: tile.start], isa)
        _visit(columns[tile], targets[tile], coupling[tile, tile], _some(metric, tile), codebook, keep=False, isa=isa)


def settle(columns: Columns, coupling: Tensor, metric: Tensor | None, codebook: Codebook, isa: str | None) -> None:
    """Coordinate descent: visit every column again, given the errors of all the others."""
    for tile in columns.tiles():
        targets = added(columns.weights[tile], coupling[tile], columns.errors, isa)
        _visit(columns[tile], targets, coupling[tile, tile], _some(metric, tile), codebook, keep=True, isa=isa)


def _some(metric: Tensor | None, tile: slice) -> Tensor | None:
    return None if metric is None else metric[tile]


def _visit(
    columns: Columns, targets: Tensor, coupling: Tensor, metric: Tensor | None, codebook: Codebook, *, keep: bool, isa: str | None
) -> None:
    """With `keep` a code is only replaced by one that is nearer to the target, so that no visit raises the error."""
    if isinstance(codebook, Points):
        assert metric is not None
        vectors.visit(columns, targets, coupling, metric, codebook, keep=keep, isa=isa)
        return
    assert isinstance(codebook, codebooks.Levels)
    levels = codebook.levels
    if isa is None:
        _visit_reference(columns, targets, coupling, levels, keep)
        return
    found = table(levels)
    processor.native().feedback(
        isa,
        *(array.numpy() for array in (targets, columns.weights, columns.errors, columns.codes, columns.scale)),
        None if columns.offset is None else columns.offset.numpy(),
        coupling.contiguous().numpy(),
        *found.arrays,
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
            # the present value is decoded from its code: weight minus error has a rounding error of its own
            present = decode(columns.codes[k], levels, scale, offset)
            nearer = (target - decoded).abs() < (target - present).abs()
            codes, error = torch.where(nearer, codes, columns.codes[k]), torch.where(nearer, error, columns.errors[k])
        change = error - columns.errors[k]
        columns.codes[k], columns.errors[k] = codes, error
        # rounded after the product and after the sum, not fused: as in the native loop
        targets[k + 1 :] += coupling[k + 1 :, k].unsqueeze(1) * change


@dataclass(frozen=True)
class Table:
    values: Tensor  # rising
    boundaries: Tensor  # what lies above the i-th is rounded to value i + 1
    codes: Tensor  # of each value
    by_code: Tensor  # (256,) the value of each code
    consecutive: bool  # the values are consecutive integers, whose rounding needs no table
    minus_zero: int  # the code of -0 where rounding keeps the sign of a zero, else -1

    @property
    def arrays(self) -> tuple[Any, ...]:
        """As native code takes them."""
        tensors = self.values, self.boundaries, self.codes, self.by_code
        return *(tensor.numpy() for tensor in tensors), self.consecutive, self.minus_zero


@cache
def table(levels: Levels) -> Table:
    """`codes.nearest` as arrays. They are read off its results, so that the native loop resolves every tie as it does."""
    values = torch.tensor(sorted({level for level in levels if math.isfinite(level)}), dtype=torch.float64)
    codes = nearest(values.float(), levels)
    middle = ((values[1:] + values[:-1]) / 2).float()
    upper = nearest(middle, levels) == codes[1:]  # where a tie goes to the upper value, the boundary lies just below it
    boundaries = torch.where(upper, middle.nextafter(torch.tensor(-torch.inf)), middle)
    by_code = torch.zeros(256)
    by_code[: len(levels)] = level_values(levels)
    consecutive = first_of_consecutive(levels) is not None
    zero, minus_zero = nearest(torch.tensor([0.0, -0.0]), levels).tolist()
    return Table(values.float(), boundaries, codes, by_code, consecutive, -1 if zero == minus_zero else minus_zero)
