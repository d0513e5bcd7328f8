"""Packed weights as a decode step multiplies by them: in tiles where that is fastest, as they are stored elsewhere, floats as floats.

Weights that read the same input and share a format are one matrix: q, k and v are one product, gate and up another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from fewbits import formats, kernels
from fewbits.kernels.tiling import Tiled, tiled

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Parts
    from fewbits.kernels import Kernel

_STRIPE = 16  # rows; native/tiles.h


@dataclass(frozen=True)
class Piece:
    """One weight of a model."""

    format: str
    parts: Parts
    shape: tuple[int, int]
    bias: Tensor | None = None


@dataclass(frozen=True)
class Matrix:
    format: str
    shape: tuple[int, int]
    kernel: Kernel
    bias: Tensor | None
    tiles: Tiled | None  # None: `parts`
    parts: Parts

    @property
    def is_float(self) -> bool:
        return self.parts.keys() == {"values"}

    @property
    def nbytes(self) -> int:
        return self.tiles.tiles.nbytes if self.tiles else sum(part.nbytes for part in self.parts.values())

    @property
    def runs_on(self) -> str:
        """For people: what multiplies one token by it."""
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
        """As native/decoder.cc takes it: kind, instruction set, rows, arrays of bytes, bias."""
        if self.tiles:
            arrays, kind = [self.tiles.tiles[None].numpy()], self.format
        elif self.is_float:
            values = self.parts["values"]
            arrays, kind = [kernels._bytes(values)], str(values.dtype).removeprefix("torch.")
        else:
            arrays, kind = [kernels._bytes(self.parts[name]) for name in formats.get(self.format).parts(self.shape)], self.format
        return kind, self.kernel.backend.removeprefix("native-"), self.shape[0], arrays, None if self.bias is None else self.bias.numpy()


def matrices(pieces: Sequence[Piece]) -> list[Matrix]:
    """All that read one input, in order."""
    return [_matrix(_joined(list(group))) for _, group in groupby(pieces, key=_joins)]


def _joins(piece: Piece) -> object:
    """Pieces that say the same lie in one matrix: of one format, without a field for the whole weight, of whole stripes."""
    whole_weight = any(len(part) != piece.shape[0] for part in piece.parts.values())
    if whole_weight or piece.shape[0] % _STRIPE:
        return id(piece)
    return piece.format, piece.bias is None, tuple(part.dtype for part in piece.parts.values())


def _joined(pieces: list[Piece]) -> Piece:
    first = pieces[0]
    if len(pieces) == 1:
        return first
    parts = {name: torch.cat([piece.parts[name] for piece in pieces]) for name in first.parts}
    biases = [piece.bias for piece in pieces if piece.bias is not None]
    return Piece(first.format, parts, (sum(p.shape[0] for p in pieces), first.shape[1]), torch.cat(biases) if biases else None)


def _matrix(piece: Piece) -> Matrix:
    kernel = kernels.bind(formats.get(piece.format), piece.shape)
    bias = None if piece.bias is None else piece.bias.detach().float().contiguous()
    tiles = tiled(kernel, piece.parts, piece.shape)
    return Matrix(piece.format, piece.shape, kernel, bias, tiles, {} if tiles else piece.parts)
