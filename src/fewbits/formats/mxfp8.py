"""mxfp8: floats of 8 bits (e4m3) under a power of two per 32 columns, as the OCP specification of microscaling and MLX have it.

33 bytes per 32: E8M0 scale @0 (2^(byte - 127); 255 is NaN), then the 32 codes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats.fp8 import values
from fewbits.formats.microscaling import E8M0, Microscaling

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Grid

E4M3 = values(4, 3, infinite=False)


@dataclass(frozen=True, kw_only=True)
class Microscaled8(Microscaling):
    levels: tuple[float, ...] = E4M3

    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        return [grid["scales"], codes]

    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]:
        return fields[1], {"scales": fields[0]}


FORMATS = [Microscaled8(name="mxfp8", about="float8 e4m3, 2^n per 32", group=32, block=32, fields=(1, 32), scale_values=E8M0)]
