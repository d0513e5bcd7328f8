"""Super-blocks of 256 whose codes stand for vectors: w = d * sub * point, d float16 per block, sub an odd integer per group.

One kind (iq1_s) also shifts all points of a group up or down; then w = d * sub * (point + shift).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats import How
from fewbits.formats.blocks import Blocks

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Columns, Grid
    from fewbits.formats.search.vectors import VectorSearch
    from fewbits.formats.storage.codebooks import Points, Signs


@dataclass(frozen=True, kw_only=True)
class Vectors(Blocks):
    levels: None = None
    block: int = 256
    dimension: int = 8
    unit: float  # ggml's numbers times it are the points, so that sub can be an integer
    largest: int  # sub is one of 1, 3, 5 ... largest
    signs: Signs = "even"
    shifts: tuple[float, ...] = ()  # of each vector
    group_shift: float = 0.0  # of each group, up or down

    @property
    def codebook(self) -> Points:
        from fewbits.formats.storage.codebooks import Points

        return Points(self.name, self.dimension, self.unit, self.signs, self.shifts)

    def fit(self, w: Tensor, importance: Tensor | None = None, fixed: Grid | None = None, how: How = "search") -> Grid:
        from fewbits.formats.search import in_row_chunks

        return in_row_chunks(lambda rows: self.search.fit(rows, importance, how), w)

    @property
    def search(self) -> VectorSearch:
        from fewbits.formats.search.vectors import VectorSearch

        return VectorSearch(self.codebook, self.group or 0, self.groups, self.largest, self.group_shift)

    def encode(self, w: Tensor, grid: Grid, importance: Tensor | None = None) -> Tensor:
        from fewbits.formats.storage.codebooks import normalised

        weigh = None if importance is None else normalised(importance)
        return self.codebook.encoded(w, *self.of_groups(grid), weigh)

    def of_groups(self, grid: Grid) -> tuple[Tensor, Tensor | None]:
        """(rows, groups): scale and offset."""
        scale = grid["d"].float().repeat_interleave(self.groups, 1) * grid["sub"].float()
        return scale, scale * grid["shift"].float() * self.group_shift if self.group_shift else None

    def affine(self, grid: Grid, columns: Columns = slice(None)) -> tuple[Tensor, Tensor | None]:
        from fewbits.formats.storage.codes import spread

        assert self.group
        scale, offset = self.of_groups(grid)
        return spread(scale, self.group, columns), None if offset is None else spread(offset, self.group, columns)


def nibbles(values: Tensor) -> Tensor:
    """(..., 2n) numbers below 16 -> (..., n) bytes, the first of two low."""
    import torch

    return (values[..., 0::2] | values[..., 1::2] << 4).to(torch.uint8)


def of_nibbles(packed: Tensor) -> Tensor:
    import torch

    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def stored_sub(grid: Grid) -> Tensor:
    """The bits of an odd integer without the last."""
    return grid["sub"].int() >> 1


def sub_of(stored: Tensor) -> Tensor:
    import torch

    return (stored.int() * 2 + 1).to(torch.int8)


def little_endian(numbers: Tensor, dtype: str) -> Tensor:
    """(..., n) int32 -> the bytes of each as int16 or int32, (..., n * size)."""
    import torch

    wanted = getattr(torch, dtype)
    return numbers.to(wanted).contiguous().view(torch.uint8)


def from_little_endian(packed: Tensor, dtype: str) -> Tensor:
    """-> (..., n) int64, never negative."""
    import torch

    wanted = getattr(torch, dtype)
    numbers: Tensor = packed.clone(memory_format=torch.contiguous_format).view(wanted).long() & ((1 << 8 * wanted.itemsize) - 1)
    return numbers


def eight_signs(seven: Tensor) -> Tensor:
    """(...) numbers of seven bits -> eight bits in a number, whose last makes the ones even."""
    from fewbits.formats.storage.codebooks import bits_of

    return seven | (bits_of(seven, 7).sum(-1) & 1) << 7
