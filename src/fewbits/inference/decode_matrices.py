"""Packed weights as the native decoder multiplies by them: in tiles where that is fastest, else as they are stored; floats stay floats.

Weights that read the same input and share a format are joined to one matrix: q, k and v are one product, gate and up another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from fewbits import formats, kernels
from fewbits.kernels.arrays import as_bytes
from fewbits.kernels.tiles import Tiled, tiled

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Parts
    from fewbits.kernels import Kernel

_STRIPE = 16  # rows of a tile; native/matmul/tiles.h


@dataclass(frozen=True)
class StoredWeight:
    """One weight as the artifact holds it."""

    format: str
    parts: Parts
    shape: tuple[int, int]
    bias: Tensor | None = None


@dataclass(frozen=True)
class DecodeMatrix:
    format: str
    shape: tuple[int, int]
    kernel: Kernel
    bias: Tensor | None
    tiles: Tiled | None  # in the place of `parts`, which are then empty
    parts: Parts

    @property
    def is_float(self) -> bool:
        return self.parts.keys() == {"values"}

    @property
    def nbytes(self) -> int:
        return self.tiles.tiles.nbytes if self.tiles else sum(part.nbytes for part in self.parts.values())

    @property
    def runs_on(self) -> str:
        """What multiplies one token by it, as `fewbits run` reports it."""
        if self.is_float:
            return "native floats"
        return f"{self.kernel.backend}, tiles" if self.tiles else self.kernel.backend

    def matmul(self, x: Tensor) -> Tensor:  # (tokens, cols) -> (tokens, rows)
        if self.tiles:
            return self.tiles.matmul(x, self.bias)
        if self.is_float:
            return F.linear(x, self.parts["values"].float(), self.bias)
        return self.kernel.matmul(x, self.parts, self.shape, self.bias)

    def native(self) -> tuple[Any, ...]:
        """As native/decoder/decoder.cc takes it: kind, instruction set, rows, arrays of bytes, bias."""
        if self.tiles:
            arrays, kind = [self.tiles.tiles[None].numpy()], self.format
        elif self.is_float:
            values = self.parts["values"]
            arrays, kind = [as_bytes(values)], str(values.dtype).removeprefix("torch.")
        else:
            arrays, kind = [as_bytes(self.parts[name]) for name in formats.get(self.format).parts(self.shape)], self.format
        return kind, self.kernel.backend.removeprefix("native-"), self.shape[0], arrays, None if self.bias is None else self.bias.numpy()


def decode_matrices(weights: Sequence[StoredWeight]) -> list[DecodeMatrix]:
    """The matrices of all weights that read one input, in order; neighbours are joined where they can be."""
    return [_matrix(_joined(list(group))) for _, group in groupby(weights, key=_join_key)]


def rows_of(parts: Parts, rows: int, ids: Tensor) -> Parts:
    """The parts of some rows of a weight. A part with another length belongs to the whole weight. As bytes: torch indexes no float8."""
    return {name: part if len(part) != rows else part.view(torch.uint8)[ids].view(part.dtype) for name, part in parts.items()}


def _join_key(weight: StoredWeight) -> object:
    """Equal for weights that can be joined: of one format, with no part for the whole weight, of whole stripes of rows."""
    if weight.shape[0] % _STRIPE or any(len(part) != weight.shape[0] for part in weight.parts.values()):
        return id(weight)
    return weight.format, weight.bias is None, tuple(part.dtype for part in weight.parts.values())


def _joined(weights: list[StoredWeight]) -> StoredWeight:
    first = weights[0]
    if len(weights) == 1:
        return first
    parts = {name: torch.cat([weight.parts[name] for weight in weights]) for name in first.parts}
    biases = [weight.bias for weight in weights if weight.bias is not None]
    shape = (sum(weight.shape[0] for weight in weights), first.shape[1])
    return StoredWeight(first.format, parts, shape, torch.cat(biases) if biases else None)


def _matrix(weight: StoredWeight) -> DecodeMatrix:
    kernel = kernels.bind(formats.get(weight.format), weight.shape)
    bias = None if weight.bias is None else weight.bias.detach().float().contiguous()
    tiles = tiled(kernel, weight.parts, weight.shape)
    return DecodeMatrix(weight.format, weight.shape, kernel, bias, tiles, {} if tiles else weight.parts)
