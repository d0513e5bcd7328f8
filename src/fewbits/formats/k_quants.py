"""GGUF's K-quants: super-blocks of 256, whose sub-block scales are themselves small integers under one float16.

    q3_k  110 bytes: hmask[32] @0 (bit i of byte l: third bit of element 32i+l), qs[64] @32 (per 128: byte l holds the low
          two bits of l, l+32, l+64, l+96), sixteen 6-bit scales[12] @96 (stored + 32), d @108.  w = d * scale * (q - 4)
    q4_k  144 bytes: d @0, dmin @2, eight (6-bit scale, 6-bit min)[12] @4, nibbles[128] @16 (per 64: first 32 low).
          w = d * scale * q - dmin * min

K stands for these super-blocks; no k-means is involved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats import Format, How, Shape, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Columns, Grid, Parts

SUPER = 256


@dataclass(frozen=True, kw_only=True)
class SuperBlock(Format):
    block: int = SUPER
    block_bytes: int

    def parts(self, shape: Shape) -> dict[str, Spec]:
        return {"blocks": Spec("uint8", (shape[0], shape[1] // SUPER * self.block_bytes))}


@dataclass(frozen=True, kw_only=True)
class Q3K(SuperBlock):
    run: int = 16

    def fit(self, w: Tensor, importance: Tensor | None = None, fixed: Grid | None = None, how: How = "search") -> Grid:
        from fewbits.fitting import fit_scale, fit_two_level_scale, grouped, importance_like, in_row_chunks

        assert self.levels
        levels, weight = self.levels, importance_like(w, importance, 16)

        def fit(rows: Tensor) -> Grid:
            x = grouped(rows, 16)
            wanted = fit_scale(x, levels, (-4.0, 3.0), weight, how, store=lambda scale: scale)
            sub, d = fit_two_level_scale(x, levels, wanted, 16, range(-32, 32), weight, how)
            return {"sub": sub, "d": d}

        return in_row_chunks(fit, w)

    def affine(self, grid: Grid, columns: Columns = slice(None)) -> tuple[Tensor, Tensor | None]:
        from fewbits.rounding import spread

        return spread(grid["d"].float().repeat_interleave(16, 1) * grid["sub"].float(), 16, columns), None

    def pack(self, codes: Tensor, grid: Grid) -> Parts:
        import torch

        rows = len(codes)
        q = codes.reshape(rows, -1, SUPER)
        high = (q >> 2).reshape(rows, -1, 8, 32)
        hmask = sum_bits(high, [0, 1, 2, 3, 4, 5, 6, 7])
        qs = sum_bits((q & 3).reshape(rows, -1, 2, 4, 32), [0, 2, 4, 6]).reshape(rows, -1, 64)
        scale = (grid["sub"].short() + 32).to(torch.uint8).reshape(rows, -1, 16)
        low = (scale[..., :8] & 15) | ((scale[..., 8:] & 15) << 4)
        top = sum_bits((scale >> 4).reshape(rows, -1, 4, 4), [0, 2, 4, 6])
        return {"blocks": torch.cat([hmask, qs, low, top, bytes_of(grid["d"], rows)], -1).reshape(rows, -1)}

    def unpack(self, parts: Parts) -> tuple[Tensor, Grid]:
        import torch

        rows = len(parts["blocks"])
        hmask, qs, low, top, d = parts["blocks"].reshape(rows, -1, 110).split([32, 64, 8, 4, 2], -1)
        high = split_bits(hmask, [0, 1, 2, 3, 4, 5, 6, 7], 1).reshape(rows, -1, SUPER)
        q = split_bits(qs.reshape(rows, -1, 2, 32), [0, 2, 4, 6], 3).reshape(rows, -1, SUPER)
        scale = torch.cat([low & 15, low >> 4], -1) | (split_bits(top, [0, 2, 4, 6], 3).reshape(rows, -1, 16) << 4)
        sub = (scale.short() - 32).to(torch.int8).reshape(rows, -1)
        return (q | (high << 2)).reshape(rows, -1), {"sub": sub, "d": float16_of(d)}


@dataclass(frozen=True, kw_only=True)
class Q4K(SuperBlock):
    run: int = 32

    def fit(self, w: Tensor, importance: Tensor | None = None, fixed: Grid | None = None, how: How = "search") -> Grid:
        from fewbits.fitting import fit_scale_and_min, fit_two_level_scale_and_min, grouped, importance_like, in_row_chunks

        weight = importance_like(w, importance, 32)

        def fit(rows: Tensor) -> Grid:
            x = grouped(rows, 32)
            scale, minimum = fit_scale_and_min(x, 15, weight, how)
            sub, sub_min, d, dmin = fit_two_level_scale_and_min(x, 15, scale, minimum, 8, 63, weight, how)
            return {"sub": sub, "sub_min": sub_min, "d": d, "dmin": dmin}

        return in_row_chunks(fit, w)

    def affine(self, grid: Grid, columns: Columns = slice(None)) -> tuple[Tensor, Tensor | None]:
        from fewbits.rounding import spread

        scale = grid["d"].float().repeat_interleave(8, 1) * grid["sub"].float()
        minimum = grid["dmin"].float().repeat_interleave(8, 1) * grid["sub_min"].float()
        return spread(scale, 32, columns), spread(-minimum, 32, columns)

    def pack(self, codes: Tensor, grid: Grid) -> Parts:
        import torch

        rows = len(codes)
        sub, sub_min = (grid[name].reshape(rows, -1, 8) for name in ("sub", "sub_min"))
        first, second = sub[..., :4] | ((sub[..., 4:] >> 4) << 6), sub_min[..., :4] | ((sub_min[..., 4:] >> 4) << 6)
        third = (sub[..., 4:] & 15) | ((sub_min[..., 4:] & 15) << 4)
        qs = sum_bits(codes.reshape(rows, -1, 4, 2, 32), [0, 4]).reshape(rows, -1, 128)
        blocks = [bytes_of(grid["d"], rows), bytes_of(grid["dmin"], rows), first, second, third, qs]
        return {"blocks": torch.cat(blocks, -1).reshape(rows, -1)}

    def unpack(self, parts: Parts) -> tuple[Tensor, Grid]:
        import torch

        rows = len(parts["blocks"])
        d, dmin, first, second, third, qs = parts["blocks"].reshape(rows, -1, 144).split([2, 2, 4, 4, 4, 128], -1)
        sub = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], -1).reshape(rows, -1)
        sub_min = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], -1).reshape(rows, -1)
        codes = split_bits(qs.reshape(rows, -1, 4, 32), [0, 4], 15).reshape(rows, -1)
        return codes, {"sub": sub, "sub_min": sub_min, "d": float16_of(d), "dmin": float16_of(dmin)}


def sum_bits(fields: Tensor, shifts: list[int]) -> Tensor:
    """(..., k, n) fields -> (..., n) bytes, field i shifted to its place."""
    packed = fields[..., 0, :] << shifts[0]
    for i, shift in enumerate(shifts[1:], 1):
        packed = packed | (fields[..., i, :] << shift)
    return packed


def split_bits(packed: Tensor, shifts: list[int], mask: int) -> Tensor:
    """(..., n) bytes -> (..., k, n) fields."""
    import torch

    return torch.stack([(packed >> shift) & mask for shift in shifts], -2)


def bytes_of(d: Tensor, rows: int) -> Tensor:
    import torch

    return d.contiguous().view(torch.uint8).reshape(rows, -1, 2)


def float16_of(stored: Tensor) -> Tensor:
    import torch

    # a copy: the two bytes of a lone block can count as contiguous while their stride is the block's
    return stored.clone(memory_format=torch.contiguous_format).view(torch.float16).squeeze(-1)


def _levels(low: int, high: int) -> tuple[float, ...]:
    return tuple(float(q) for q in range(low, high + 1))


FORMATS = [
    Q3K(name="q3_k", about="3 bits, 6-bit scales", levels=_levels(-4, 3), block_bytes=110),
    Q4K(name="q4_k", about="4 bits, 6-bit scales and minima", levels=_levels(0, 15), block_bytes=144),
]
