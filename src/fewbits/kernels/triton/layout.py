"""How a packed weight is laid out in a GPU's memory; repack.py converts to this layout and back.

Codes are stored in planes of 8, 4, 2 or 1 bits, whatever their format; codes of 6 bits are a plane of 4 bits and one of 2. A tile is 256
columns, the size of a super-block of the K types. In a 4-bit plane, one row of a tile is 128 bytes, a whole cache line:

    byte j, low nibble   column j          a lane that loads 16 bytes gets 16 neighbouring columns and the 16 columns 128 further on: it
    byte j, high nibble  column 128 + j    decodes them by shifting what it loaded, and needs no byte of another lane

    plane of   8 bits          4               2                      1
    byte j     column j        j, j + 128      j, j + 64, ...         j, j + 32, j + 64, ...       (j counts within a piece, see below)
    bytes      256             128             64                     32                           per row and tile: whole sectors of 32

The narrowest plane decides how a tile is cut into sub-tiles: 1 of 256 columns, 2 of 128, 4 of 64 or 8 of 32. A wider plane beside it is
cut into pieces of as many bytes as a sub-tile has columns, so that sub-tile s has the same columns in all planes.

Codes that stand for vectors have no planes: what 32 columns have of them is in arrays beside the scales (kernels/codebooks.py),
(tiles, rows, entries of a tile).

Scales, zeros and minima are stored group by group, with the entries of all rows for a group next to each other: the rows that a program
multiplies then read contiguous memory. Rows are padded to whole tiles with values that decode to zero. A scale of the whole weight is
stored once per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.formats import Shape

TILE = 256
_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}


@dataclass(frozen=True)
class Field:
    """One array of scales, zeros or minima: its name in the format's grid, and how many columns share an entry (0: the whole row)."""

    name: str
    group: int
    dtype: str
    shared: bool = False  # the grid has one entry for the whole weight
    beside: str | None = None  # a second array of the same type, stored in the upper half of each entry so that one load reads both

    @property
    def stored(self) -> str:
        return self.dtype if self.beside is None else {"float16": "int32", "uint8": "int16"}[self.dtype]


@dataclass(frozen=True)
class Layout:
    """What a kernel must know about a format. Every field is compiled into the kernel as a constant."""

    format: str
    family: str
    planes: tuple[int, ...]  # bits, the wider first; none where codes stand for vectors
    levels: str  # how a code becomes a level: see kernels/decode.py
    first: float  # of integers: the level of code 0
    group: int  # columns under one scale; 0: the whole row
    fields: tuple[Field, ...]

    @property
    def bits(self) -> int:
        """Of the narrowest plane; 0 without planes."""
        return self.planes[-1] if self.planes else 0

    @property
    def subtiles(self) -> int:
        return 8 // self.bits if self.bits else 1

    @property
    def subtile(self) -> int:
        """Columns of a sub-tile, and bytes of a piece."""
        return TILE // self.subtiles

    def nbytes(self, shape: Shape) -> int:
        """Bytes in the GPU's memory, all of which a product of one token reads."""
        tiles = -(-shape[1] // TILE)
        codes = sum(shape[0] * tiles * TILE * bits // 8 for bits in self.planes)
        sizes = {"float16": 2, "float32": 4, "int8": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8}
        return codes + sum(shape[0] * entries(field, shape[1]) * sizes[field.stored] for field in self.fields)


@dataclass(frozen=True)
class Planar:
    """A weight as the kernels read it."""

    layout: Layout
    shape: Shape
    planes: tuple[Tensor, ...]  # (rows, bytes) uint8
    grid: tuple[Tensor, ...]  # (entries, rows), or (tiles, rows, entries of a tile)

    def to(self, device: torch.device | str) -> Planar:
        return of_arrays(self.layout, self.shape, [array.to(device) for array in self.arrays])

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        return (*self.planes, *self.grid)

    def rows(self, ids: Tensor) -> Planar:
        """A weight of these rows alone, in the order of the ids (n,)."""
        return Planar(self.layout, (len(ids), self.shape[1]), tuple(p[ids] for p in self.planes), tuple(g[:, ids] for g in self.grid))


def of_arrays(layout: Layout, shape: Shape, arrays: Sequence[Tensor]) -> Planar:
    """A weight from its arrays: planes, then grid."""
    count = len(layout.planes)
    return Planar(layout, shape, tuple(arrays[:count]), tuple(arrays[count:]))


def planes_of(known: tuple[float, ...]) -> tuple[int, ...]:
    bits = (len(known) - 1).bit_length()
    return _PLANES.get(bits, (8,))


def entries(field: Field, cols: int) -> int:
    return 1 if field.group == 0 else -(-cols // TILE) * max(1, TILE // field.group)
