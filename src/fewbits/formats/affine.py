"""Symmetric integers with a float16 scale per group or per row: w = scale * q.

    codes   4 bits: element 2j in the low nibble of byte j, 2j+1 in the high one, stored as q + 8
            8 bits: int8, stored as q
    scales  float16 [rows, groups]

int4_g32 holds the same values as GGUF's q4_0 and as ONNX Runtime's MatMulNBits with blocks of 32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats import Format, How, Shape, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Columns, Grid, Parts


@dataclass(frozen=True, kw_only=True)
class Integer(Format):
    bits: int
    ends: tuple[float, ...]

    def parts(self, shape: Shape) -> dict[str, Spec]:
        rows, cols = shape
        codes = Spec("int8", shape) if self.bits == 8 else Spec("uint8", (rows, cols * self.bits // 8))
        return {"codes": codes, "scales": Spec("float16", (rows, cols // (self.run or cols)))}

    def fit(self, w: Tensor, importance: Tensor | None = None, fixed: Grid | None = None, how: How = "search") -> Grid:
        from fewbits.fitting import fit_scale, grouped, importance_like, in_row_chunks

        assert self.levels
        levels, run = self.levels, self.run or w.shape[1]
        weight = importance_like(w, importance, run)
        return in_row_chunks(lambda rows: {"scales": fit_scale(grouped(rows, run), levels, self.ends, weight, how).half()}, w)

    def affine(self, grid: Grid, columns: Columns = slice(None)) -> tuple[Tensor, Tensor | None]:
        from fewbits.rounding import spread

        scales = grid["scales"].float()
        return (scales if self.run is None else spread(scales, self.run, columns)), None

    def pack(self, codes: Tensor, grid: Grid) -> Parts:
        import torch

        if self.bits == 8:
            return {"codes": (codes.short() - 128).to(torch.int8), **grid}
        return {"codes": codes[:, 0::2] | (codes[:, 1::2] << 4), **grid}

    def unpack(self, parts: Parts) -> tuple[Tensor, Grid]:
        import torch

        stored, grid = parts["codes"], {"scales": parts["scales"]}
        if self.bits == 8:
            return (stored.short() + 128).to(torch.uint8), grid
        return torch.stack([stored & 15, stored >> 4], -1).reshape(len(stored), -1), grid


def _levels(bits: int) -> tuple[float, ...]:
    return tuple(float(q) for q in range(-(2 ** (bits - 1)), 2 ** (bits - 1)))


FORMATS = [
    Integer(name="int8_channel", about="8 bits, one scale per row", levels=_levels(8), run=None, bits=8, ends=(127.0,)),
    Integer(name="int4_g32", about="4 bits, one scale per 32", levels=_levels(4), run=32, block=32, bits=4, ends=(-8.0, 7.0)),
]
