"""What GGUF's block formats share: a weight is one array of equal blocks, and a block is a few fields of bits.

There are four structures; a format adds its levels and where its bits lie:

    OneScale        w = d * level                      d float16 per block
    ScaleAndMin     w = d * q + m                      d, m float16 per block
    SubScales       w = d * sub * level                d float16 per block, sub a small integer per group
    SubScalesAndMins  w = d * sub * q - dmin * sub_min   d, dmin float16 per block, sub, sub_min small integers per group
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats import Format, How, Shape, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Columns, Grid, Parts


@dataclass(frozen=True, kw_only=True)
class Blocks(Format):
    fields: tuple[int, ...]  # bytes of each field of a block, in order

    @abstractmethod
    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        """codes (rows, blocks, block), grid entries (rows, blocks, n) -> the bytes of each field (rows, blocks, bytes)."""

    @abstractmethod
    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]: ...

    @property
    def block_bytes(self) -> int:
        return sum(self.fields)

    @property
    def groups(self) -> int:
        """How many groups of columns a block holds."""
        assert self.group
        return self.block // self.group

    def parts(self, shape: Shape) -> dict[str, Spec]:
        return {"blocks": Spec("uint8", (shape[0], shape[1] // self.block * self.block_bytes))}

    def pack(self, codes: Tensor, grid: Grid) -> Parts:
        import torch

        shape = len(codes), codes.shape[1] * self.dimension // self.block, -1
        fields = self.to_fields(codes.reshape(shape), {name: entry.reshape(shape) for name, entry in grid.items()})
        return {"blocks": torch.cat(fields, -1).reshape(len(codes), -1)}

    def unpack(self, parts: Parts) -> tuple[Tensor, Grid]:
        rows = len(parts["blocks"])
        codes, grid = self.from_fields(*parts["blocks"].reshape(rows, -1, self.block_bytes).split(self.fields, -1))
        return codes.reshape(rows, -1), {name: entry.reshape(rows, -1) for name, entry in grid.items()}


@dataclass(frozen=True, kw_only=True)
class OneScale(Blocks):
    ends: tuple[float, ...]  # levels that the largest weight of a block may be put at

    def fit(self, w: Tensor, importance: Tensor | None = None, fixed: Grid | None = None, how: How = "search") -> Grid:
        from fewbits.formats.search import fit_scale, grouped, importance_like, in_row_chunks

        assert self.levels
        levels, weight = self.levels, importance_like(w, importance, self.block)
        return in_row_chunks(lambda rows: {"d": fit_scale(grouped(rows, self.block), levels, self.ends, weight, how).half()}, w)

    def affine(self, grid: Grid, columns: Columns = slice(None)) -> tuple[Tensor, Tensor | None]:
        from fewbits.formats.storage.codes import spread

        return spread(grid["d"].float(), self.block, columns), None


@dataclass(frozen=True, kw_only=True)
class ScaleAndMin(Blocks):
    def fit(self, w: Tensor, importance: Tensor | None = None, fixed: Grid | None = None, how: How = "search") -> Grid:
        from fewbits.formats.search import fit_scale_and_min, grouped, importance_like, in_row_chunks

        assert self.levels
        top, weight = len(self.levels) - 1, importance_like(w, importance, self.block)

        def fit(rows: Tensor) -> Grid:
            d, minimum = fit_scale_and_min(grouped(rows, self.block), top, weight, how, float16=True)
            return {"d": d.half(), "m": (-minimum).half()}

        return in_row_chunks(fit, w)

    def affine(self, grid: Grid, columns: Columns = slice(None)) -> tuple[Tensor, Tensor | None]:
        from fewbits.formats.storage.codes import spread

        return spread(grid["d"].float(), self.block, columns), spread(grid["m"].float(), self.block, columns)


@dataclass(frozen=True, kw_only=True)
class SubScales(Blocks):
    ends: tuple[float, ...]
    integers: range  # what a sub-scale may be

    def fit(self, w: Tensor, importance: Tensor | None = None, fixed: Grid | None = None, how: How = "search") -> Grid:
        from fewbits.formats.search import fit_scale, grouped, importance_like, in_row_chunks
        from fewbits.formats.search.superblocks import fit_two_level_scale

        assert self.levels and self.group
        levels, group, weight = self.levels, self.group, importance_like(w, importance, self.group)

        def fit(rows: Tensor) -> Grid:
            x = grouped(rows, group)
            wanted = fit_scale(x, levels, self.ends, weight, how, store=lambda scale: scale)
            sub, d = fit_two_level_scale(x, levels, wanted, self.groups, self.integers, weight, how)
            return {"sub": sub, "d": d}

        return in_row_chunks(fit, w)

    def affine(self, grid: Grid, columns: Columns = slice(None)) -> tuple[Tensor, Tensor | None]:
        from fewbits.formats.storage.codes import spread

        assert self.group
        return spread(grid["d"].float().repeat_interleave(self.groups, 1) * grid["sub"].float(), self.group, columns), None


@dataclass(frozen=True, kw_only=True)
class SubScalesAndMins(Blocks):
    largest: int  # the largest sub-scale and sub-minimum

    def fit(self, w: Tensor, importance: Tensor | None = None, fixed: Grid | None = None, how: How = "search") -> Grid:
        from fewbits.formats.search import fit_scale_and_min, grouped, importance_like, in_row_chunks
        from fewbits.formats.search.superblocks import fit_two_level_scale_and_min

        assert self.levels and self.group
        top, group, weight = len(self.levels) - 1, self.group, importance_like(w, importance, self.group)

        def fit(rows: Tensor) -> Grid:
            x = grouped(rows, group)
            scale, minimum = fit_scale_and_min(x, top, weight, how)
            sub, sub_min, d, dmin = fit_two_level_scale_and_min(x, top, scale, minimum, self.groups, self.largest, weight, how)
            return {"sub": sub, "sub_min": sub_min, "d": d, "dmin": dmin}

        return in_row_chunks(fit, w)

    def affine(self, grid: Grid, columns: Columns = slice(None)) -> tuple[Tensor, Tensor | None]:
        from fewbits.formats.storage.codes import spread

        assert self.group
        scale = grid["d"].float().repeat_interleave(self.groups, 1) * grid["sub"].float()
        minimum = grid["dmin"].float().repeat_interleave(self.groups, 1) * grid["sub_min"].float()
        return spread(scale, self.group, columns), spread(-minimum, self.group, columns)


def consecutive(low: int, high: int) -> tuple[float, ...]:
    return tuple(float(q) for q in range(low, high + 1))
