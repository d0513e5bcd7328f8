"""GGUF's blocks of 32 with one float16 scale d: w = d * q. Layout, little-endian:

q4_0  18 bytes: d @0, nibbles[16] @2 (byte j: element j low, j+16 high; stored as q + 8)
q8_0  34 bytes: d @0, int8[32] @2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats import Format, How, Shape, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Columns, Grid, Parts


@dataclass(frozen=True, kw_only=True)
class Block32(Format):
    run: int = 32
    block: int = 32
    block_bytes: int
    ends: tuple[float, ...]  # where the largest weight of a block may be put

    def parts(self, shape: Shape) -> dict[str, Spec]:
        return {"blocks": Spec("uint8", (shape[0], shape[1] // 32 * self.block_bytes))}

    def fit(self, w: Tensor, importance: Tensor | None = None, fixed: Grid | None = None, how: How = "search") -> Grid:
        from fewbits.fitting import fit_scale, grouped, importance_like, in_row_chunks

        assert self.levels
        levels, weight = self.levels, importance_like(w, importance, 32)
        return in_row_chunks(lambda rows: {"d": fit_scale(grouped(rows, 32), levels, self.ends, weight, how).half()}, w)

    def affine(self, grid: Grid, columns: Columns = slice(None)) -> tuple[Tensor, Tensor | None]:
        from fewbits.rounding import spread

        return spread(grid["d"].float(), 32, columns), None

    def pack(self, codes: Tensor, grid: Grid) -> Parts:
        import torch

        rows = len(codes)
        q = codes.reshape(rows, -1, 32)
        body = q - 128 if self.block_bytes == 34 else q[..., :16] | (q[..., 16:] << 4)  # uint8 wraps: q - 128 is int8's byte
        d = grid["d"].contiguous().view(torch.uint8).reshape(rows, -1, 2)
        return {"blocks": torch.cat([d, body], -1).reshape(rows, -1)}

    def unpack(self, parts: Parts) -> tuple[Tensor, Grid]:
        import torch

        rows = len(parts["blocks"])
        blocks = parts["blocks"].reshape(rows, -1, self.block_bytes)
        d, body = blocks[..., :2].clone(memory_format=torch.contiguous_format).view(torch.float16).reshape(rows, -1), blocks[..., 2:]
        codes = body + 128 if self.block_bytes == 34 else torch.cat([body & 15, body >> 4], -1)
        return codes.reshape(rows, -1), {"d": d}


def _levels(low: int, high: int) -> tuple[float, ...]:
    return tuple(float(q) for q in range(low, high + 1))


FORMATS = [
    Block32(name="q4_0", about="4 bits, one scale per 32", levels=_levels(-8, 7), block_bytes=18, ends=(-8.0, 7.0)),
    Block32(name="q8_0", about="8 bits, one scale per 32", levels=_levels(-128, 127), block_bytes=34, ends=(127.0,)),
]
