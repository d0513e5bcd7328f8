"""GGUF's small blocks of one and of two bits: w = d * level, one float16 d. Layout:

q1_0  18 bytes for 128: d @0, signs[16] @2 (bit i of byte l: column 8l + i).  level = -1 or 1
q2_0  18 bytes for 64: d @0, codes[16] @2 (byte l: columns 4l .. 4l+3, the first lowest).  level = q - 1, q in 0..3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats import How
from fewbits.formats.blocks import OneScale, consecutive

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Grid


@dataclass(frozen=True, kw_only=True)
class InBytes(OneScale):
    bits: int  # of a code; neighbours lie in one byte

    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        from fewbits.formats.storage.bitfields import float16_bytes, join

        per_byte = 8 // self.bits
        return [float16_bytes(grid["d"]), join(codes.unflatten(-1, (-1, per_byte)).transpose(-1, -2), self.bits)]

    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]:
        from fewbits.formats.storage.bitfields import bytes_float16, split

        return split(fields[1], self.bits).transpose(-1, -2).flatten(-2), {"d": bytes_float16(fields[0])}


@dataclass(frozen=True, kw_only=True)
class Signs(InBytes):
    def fit(self, w: Tensor, importance: Tensor | None = None, fixed: Grid | None = None, how: How = "search") -> Grid:
        """The weighted mean of the magnitudes: with two levels there is nothing to search, this is the best scale."""
        from fewbits.formats.search import float16_scale, grouped, importance_like, total

        size = grouped(w.float(), self.block).abs()
        weight = importance_like(w, importance, self.block) if how == "search" else None
        mean = total(size.clone(), 2) / self.block if weight is None else total(size * weight, 2) / total(weight.clone(), 2)
        return {"d": float16_scale(mean).half()}


FORMATS = [
    Signs(name="q1_0", about="signs, a scale per 128", levels=(-1.0, 1.0), group=128, block=128, bits=1, fields=(2, 16), ends=(1.0,)),
    InBytes(
        name="q2_0",
        about="2 bits, a scale per 64",
        levels=consecutive(-1, 2),
        group=64,
        block=64,
        bits=2,
        fields=(2, 16),
        ends=(1.0, 2.0, -1.0),
    ),
]
