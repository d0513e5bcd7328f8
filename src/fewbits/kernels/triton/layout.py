"""How a packed weight lies in a GPU's memory, and the way there and back.

Codes lie in planes of 8, 4, 2 or 1 bits, whatever their format; 6 bits are a plane of 4 and one of 2. Columns are taken 256 at a time (a
tile, and a super-block of the K types). A tile of a row of a 4-bit plane is 128 bytes, a whole line of the cache:

    byte j, low nibble   column j          a lane that loads 16 bytes has 16 neighbouring columns, and the same 16 shifted by 128:
    byte j, high nibble  column 128 + j    decoding is a shift of what was loaded, no lane needs another lane's byte

    plane of   8 bits          4               2                      1
    byte j     column j        j, j + 128      j, j + 64, ...         j, j + 32, j + 64, ...       (j counts within a piece, see below)
    bytes      256             128             64                     32                           per row and tile: whole sectors of 32

The narrowest plane says how a tile is cut into sub-tiles of columns: 1, 2, 4 or 8 of 256, 128, 64 or 32. A wider plane beside it is cut
into pieces of as many bytes as a sub-tile has columns, so that sub-tile s of all planes is the same columns.

Scales, zeros and minima lie entry by entry, all rows of an entry together: the rows of a block of the product are then one run of memory.
Rows of planes and entries are filled up to whole tiles, so that what is added stands for zero. A scale of the whole weight is written once
per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits import formats
from fewbits.errors import InputError
from fewbits.formats import Format, Shape
from fewbits.kernels.triton import levels

if TYPE_CHECKING:
    from fewbits.formats import Grid, Parts

TILE = 256
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}


@dataclass(frozen=True)
class Field:
    """One array of scales, zeros or minima: its name in the format's grid, and the columns under one entry (0: the whole row)."""

    name: str
    run: int
    dtype: str
    shared: bool = False  # one entry for the whole weight, in the grid
    beside: str | None = None  # a second one of the same type, the upper half of each stored entry: both are read by one load

    @property
    def stored(self) -> str:
        return self.dtype if self.beside is None else {"float16": "int32", "uint8": "int16"}[self.dtype]


@dataclass(frozen=True)
class Layout:
    """What a kernel must know about a format. Every field is a constant of the compiled kernel."""

    format: str
    family: str
    planes: tuple[int, ...]  # bits, the wider first
    levels: str  # how a code becomes a level: see reading.py
    first: float  # integers: the level of code 0
    run: int  # columns under one scale; 0: the whole row
    fields: tuple[Field, ...]

    @property
    def subtiles(self) -> int:
        return 8 // self.planes[-1]

    @property
    def subtile(self) -> int:
        """Columns of a sub-tile, and bytes of a piece."""
        return TILE // self.subtiles

    def nbytes(self, shape: Shape) -> int:
        """In the GPU's memory: what a product of one token reads of the weight."""
        tiles = -(-shape[1] // TILE)
        codes = sum(shape[0] * tiles * TILE * bits // 8 for bits in self.planes)
        sizes = {"float16": 2, "float32": 4, "int8": 1, "uint8": 1, "int16": 2, "int32": 4}
        return codes + sum(shape[0] * _entries(field, shape[1]) * sizes[field.stored] for field in self.fields)


@dataclass(frozen=True)
class Planar:
    """A weight as the kernels read it."""

    layout: Layout
    shape: Shape
    planes: tuple[Tensor, ...]  # (rows, bytes) uint8
    grid: tuple[Tensor, ...]  # (entries, rows)

    def to(self, device: torch.device | str) -> Planar:
        return of_arrays(self.layout, self.shape, [array.to(device) for array in self.arrays])

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        return (*self.planes, *self.grid)

    def rows(self, ids: Tensor) -> Planar:
        """These rows as a weight of their own, in the order of the ids (n,)."""
        return Planar(self.layout, (len(ids), self.shape[1]), tuple(p[ids] for p in self.planes), tuple(g[:, ids] for g in self.grid))


def unsupported(fmt: Format) -> str | None:
    """Why there is no layout for this format; None if there is."""
    if reason := levels.unsupported(fmt):
        return reason
    return None if _recognised(fmt) else f"{fmt.name} keeps its scales in a way that no family of kernels reads"


def of(fmt: Format) -> Layout:
    """The layout of a format, recognised by its structure."""
    found = None if (reason := unsupported(fmt)) else _recognised(fmt)
    if found is None:
        raise InputError(f"no GPU layout: {reason}", "decode the weight, or choose another format")
    return found


@cache
def _recognised(fmt: Format) -> Layout | None:
    from fewbits.kernels.triton import families

    return families.layout(fmt)


def of_arrays(layout: Layout, shape: Shape, arrays: Sequence[Tensor]) -> Planar:
    """A weight from its arrays: planes, then grid."""
    count = len(layout.planes)
    return Planar(layout, shape, tuple(arrays[:count]), tuple(arrays[count:]))


def planes_of(known: tuple[float, ...]) -> tuple[int, ...]:
    bits = (len(known) - 1).bit_length()
    return _PLANES.get(bits, (8,))


def repack(fmt: Format, parts: Parts) -> Planar:
    """On the processor, wherever the parts lie: formats unpack with tables that are there."""
    layout = of(fmt)
    codes, grid = fmt.unpack({name: part.cpu() for name, part in parts.items()})
    rows, cols = codes.shape
    padded = torch.cat([codes, _code_of_zero(layout, grid).expand(rows, -cols % TILE)], 1)
    planes, shift = [], 0
    for bits in layout.planes:
        planes.append(_to_plane((padded >> shift) & ((1 << bits) - 1), bits, layout.subtile))
        shift += bits
    entries = tuple(_to_entries(grid, field, (rows, cols)) for field in layout.fields)
    return Planar(layout, (rows, cols), tuple(planes), entries)


def _code_of_zero(layout: Layout, grid: Grid) -> Tensor:  # (rows or 1, 1)
    """What columns behind the last are filled up with. Where the whole row has one scale they have it too, and must stand for zero: as
    float16, -128 times a scale of 512 is an infinity, which not even an x of zero takes away."""
    if layout.run or layout.levels != "integers":  # the scale is filled up with zero, or code 0 is zero
        return torch.zeros((1, 1), dtype=torch.uint8)
    return grid["zeros"].to(torch.uint8) if "zeros" in grid else torch.full((1, 1), round(-layout.first), dtype=torch.uint8)


def restore(weight: Planar) -> Parts:
    """The format's own parts again, to the bit."""
    fmt, layout, (rows, cols) = formats.get(weight.layout.format), weight.layout, weight.shape
    codes, shift = torch.zeros((rows, weight.planes[0].shape[1] * 8 // layout.planes[0]), dtype=torch.uint8), 0
    for bits, plane in zip(layout.planes, weight.planes, strict=True):
        codes |= _from_plane(plane.cpu(), bits, layout.subtile) << shift
        shift += bits
    grid: Grid = {}
    for field, entries in zip(layout.fields, weight.grid, strict=True):
        grid |= _from_entries(entries.cpu(), field, cols)
    return fmt.pack(codes[:, :cols].contiguous(), grid)


def _to_plane(codes: Tensor, bits: int, subtile: int) -> Tensor:  # (rows, padded cols) -> (rows, bytes)
    if bits == 8:
        return codes.contiguous()
    tiles = codes.unflatten(1, (-1, TILE * bits // (8 * subtile), 8 // bits, subtile))  # tile, piece, place in a byte, column
    plane: Tensor = tiles[:, :, :, 0].clone()
    for place in range(1, 8 // bits):
        plane |= tiles[:, :, :, place] << (bits * place)
    return plane.flatten(1)


def _from_plane(plane: Tensor, bits: int, subtile: int) -> Tensor:
    if bits == 8:
        return plane
    pieces: Tensor = plane.unflatten(1, (-1, TILE * bits // (8 * subtile), subtile))
    return torch.stack([(pieces >> (bits * place)) & ((1 << bits) - 1) for place in range(8 // bits)], 3).flatten(1)


def _entries(field: Field, cols: int) -> int:
    return 1 if field.run == 0 else -(-cols // TILE) * max(1, TILE // field.run)


def _to_entries(grid: Grid, field: Field, shape: Shape) -> Tensor:
    rows, cols = shape
    if field.shared:
        return grid[field.name].reshape(1, 1).expand(1, rows).contiguous()
    whole = [
        torch.nn.functional.pad(grid[name].T, (0, 0, 0, _entries(field, cols) - grid[name].shape[1])).contiguous()
        for name in (field.name, field.beside)
        if name
    ]
    return whole[0] if field.beside is None else torch.stack(whole, 2).view(getattr(torch, field.stored)).squeeze(2)


def _from_entries(entries: Tensor, field: Field, cols: int) -> Grid:
    if field.shared:
        return {field.name: entries[:1, :1].clone()}
    whole = entries[: 1 if field.run == 0 else cols // field.run].unsqueeze(2).view(getattr(torch, field.dtype))
    # clone: a single entry would count as contiguous with the stride that it has here
    return {
        name: whole[:, :, i].T.clone(memory_format=torch.contiguous_format) for i, name in enumerate((field.name, field.beside)) if name
    }
