"""Floats of 4 bits (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign) whose block scales are 8-bit floats. GGUF's layouts:

    mxfp4  17 bytes per 32: E8M0 scale @0 (2^(byte - 127); 255 is NaN), nibbles[16] @1 (byte j: element j low, j+16 high)
    nvfp4  36 bytes per 64: four UE4M3 scales @0, one per 16 (e4m3 without a sign: to 448; 127 is NaN), then 8 bytes for each
           sixteen (byte j: element j low, j+8 high)

A NaN scale is never written; read, it makes its block NaN as the specifications say (ggml takes it for a number).
UE4M3 reaches from 2^-9 to 448 and loses precision below 2^-6. So nvfp4 as in GGUF suits weights of 0.1 and more;
nvfp4_tensor is NVIDIA's version: a float32 factor for the whole weight brings any weight into that range. Ours is 2^-10 for weights of
usual size, 2^8 more or less for others: a power of two costs no precision and is exact in every reader, and layers that a runtime joins
(q, k, v) share one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fewbits.formats import How, Shape, Spec
from fewbits.formats.blocks import Blocks

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Columns, Grid, Parts

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0 = (*(2.0 ** (code - 127) for code in range(255)), math.nan)
UE4M3 = (*((8 + code % 8) * 2.0 ** (code // 8 - 10) if code >= 8 else code * 2.0**-9 for code in range(127)), math.nan)

# How many codes away from the specification's scale the search looks. One exponent up gives the peak a level instead of clipping
# it, one down clips a column that matters little. Six UE4M3 codes up are 1.7 times: the peak moves from 6 to 4, between which
# there is no level, and the error of Gaussians falls from 0.086 (neighbours only) to 0.081.
NEARBY = {len(E8M0): (1, -1, -2), len(UE4M3): (-1, 1, -2, 2, 3, 4, 5, 6)}


@dataclass(frozen=True, kw_only=True)
class Microscaling(Blocks):
    levels: tuple[float, ...] = E2M1
    group: int
    scale_values: tuple[float, ...]  # value of each scale byte

    def fit(self, w: Tensor, importance: Tensor | None = None, fixed: Grid | None = None, how: How = "search") -> Grid:
        import torch

        from fewbits.formats.search import grouped, importance_like, in_row_chunks
        from fewbits.formats.search.trials import best_of

        weight, table = importance_like(w, importance, self.group), self._table()
        last = len(self.scale_values) - 2  # below NaN

        def fit(rows: Tensor) -> Grid:
            x = grouped(rows, self.group)
            textbook = self._textbook(x.abs().amax(-1))
            if how == "max":
                return {"codes": textbook.to(torch.uint8)}
            trials = [(textbook + step).clamp(0, last) for step in (0, *NEARBY[len(self.scale_values)])]
            chosen = best_of(x, self.levels, (table[trial] for trial in trials), weight)
            return {"codes": torch.searchsorted(table[: last + 1], chosen).to(torch.uint8)}

        return {"scales": in_row_chunks(fit, w)["codes"]}

    def affine(self, grid: Grid, columns: Columns = slice(None)) -> tuple[Tensor, Tensor | None]:
        from fewbits.formats.storage.codes import spread

        codes = grid["scales"].int() & (255 if len(self.scale_values) == 256 else 127)  # UE4M3 has no sign: ggml ignores its bit
        return spread(self._table()[codes], self.group, columns), None

    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        from fewbits.formats.storage.bitfields import halves

        return [grid["scales"], halves(codes.unflatten(-1, (self.groups, self.group))).flatten(-2)]

    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]:
        from fewbits.formats.storage.bitfields import unhalve

        return unhalve(fields[1].unflatten(-1, (self.groups, self.group // 2))).flatten(-2), {"scales": fields[0]}

    def _table(self) -> Tensor:
        from fewbits.formats.storage.codes import level_values

        return level_values(self.scale_values)

    def _textbook(self, peak: Tensor) -> Tensor:  # (...) -> scale codes as integers
        import torch

        if self.scale_values == E8M0:  # OCP: the exponent of the peak less that of the largest level (6); 6.1 to 7.9 are clipped
            largest = max(level for level in self.levels if math.isfinite(level))
            exponent = torch.frexp(peak).exponent - math.frexp(largest)[1]
            return torch.where(peak == 0, 0, exponent.long() + 127).clamp(0, 254)
        # NVIDIA: the peak at 6, rounded as a float8
        return (peak / 6).clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8).long()


@dataclass(frozen=True, kw_only=True)
class WithFactor(Microscaling):
    def parts(self, shape: Shape) -> dict[str, Spec]:
        return {**super().parts(shape), "factor": Spec("float32", (1, 1))}

    def fit(self, w: Tensor, importance: Tensor | None = None, fixed: Grid | None = None, how: How = "search") -> Grid:
        factor = fixed["factor"] if fixed else _factor(w.abs().amax()).reshape(1, 1)
        return {**super().fit(w / factor, importance, how=how), "factor": factor}

    def affine(self, grid: Grid, columns: Columns = slice(None)) -> tuple[Tensor, Tensor | None]:
        return super().affine(grid, columns)[0] * grid["factor"], None

    def pack(self, codes: Tensor, grid: Grid) -> Parts:
        return {**super().pack(codes, {"scales": grid["scales"]}), "factor": grid["factor"]}

    def unpack(self, parts: Parts) -> tuple[Tensor, Grid]:
        codes, grid = super().unpack(parts)
        return codes, {**grid, "factor": parts["factor"]}


def _factor(peak: Tensor) -> Tensor:
    """Scales up to 224: the search gets an octave above to move in. A step of 2^8 still leaves scales of six octaves below the largest
    their full precision."""
    import torch

    exponent = torch.frexp(peak / (6 * 224)).exponent  # the least n with peak < 2^n * 6 * 224
    steps = torch.ceil((exponent.float() + 10) / 8)
    return torch.where(peak == 0, 1.0, torch.exp2((8 * steps - 10).clamp(-120, 120)))


_NV: dict[str, Any] = {"group": 16, "block": 64, "fields": (4, 32), "scale_values": UE4M3}

FORMATS = [
    Microscaling(name="mxfp4", about="4-bit floats, 2^n per 32", group=32, block=32, fields=(1, 16), scale_values=E8M0),
    Microscaling(name="nvfp4", about="4-bit floats, 8-bit per 16", **_NV),
    WithFactor(name="nvfp4_tensor", about="nvfp4 and a scale for all", tensor_wide=True, **_NV),
]
