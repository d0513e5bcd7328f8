"""Floats of 8 bits under a float32 scale per row (channel) or for the whole weight (tensor): w = scale * fp8.

    e4m3   sign, 4 exponent bits (bias 7), 3 mantissa bits: to 448; no infinity, NaN is 0x7F and 0xFF (torch's float8_e4m3fn)
    e5m2   sign, 5 exponent bits (bias 15), 2 mantissa bits: to 57344; infinities 0x7C and 0xFC, NaN above them

    codes   float8 [rows, cols]: a type that torch, safetensors and compressed-tensors know
    scales  float32 [rows, 1] or [1, 1]. float16 is too coarse: 0.1 / 57344 lies among its last subnormals, 3 % apart

Rounding is to nearest even and saturates, so that a weight never becomes infinity or NaN; where a file holds such codes, they decode to
infinity and NaN. There is no cast without a scale: e4m3's normal numbers begin at 2^-6, above most weights of a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fewbits.formats import Format, How, Shape, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Columns, Grid, Parts

# A float's steps grow with its values, so that it matters where within an octave the weights fall: the search tries one octave in
# sixths. Beyond it there is one ratio on each side: clipping the largest weight a little, or leaving another octave unused.
_RATIOS = (1.12, 1.0, 0.89, 0.79, 0.71, 0.63, 0.56, 0.5, 0.35)


@dataclass(frozen=True, kw_only=True)
class Float8(Format):
    group: None = None
    dtype: str
    largest: float

    def parts(self, shape: Shape) -> dict[str, Spec]:
        return {"codes": Spec(self.dtype, shape), "scales": Spec("float32", (1 if self.tensor_wide else shape[0], 1))}

    def fit(self, w: Tensor, importance: Tensor | None = None, fixed: Grid | None = None, how: How = "search") -> Grid:
        from fewbits.formats.search import importance_like
        from fewbits.formats.search.trials import fit_row_scale

        if fixed is not None:
            return fixed
        assert self.levels
        weight = importance_like(w, importance, w.shape[1])
        flat = None if weight is None else weight.flatten()
        return {"scales": fit_row_scale(w, self.levels, (self.largest,), _RATIOS, flat, how, lambda scale: scale, self.tensor_wide)}

    def affine(self, grid: Grid, columns: Columns = slice(None)) -> tuple[Tensor, Tensor | None]:
        return grid["scales"], None

    def pack(self, codes: Tensor, grid: Grid) -> Parts:
        import torch

        return {"codes": codes.contiguous().view(getattr(torch, self.dtype)), **grid}

    def unpack(self, parts: Parts) -> tuple[Tensor, Grid]:
        import torch

        return parts["codes"].contiguous().view(torch.uint8), {"scales": parts["scales"]}


def values(exponent_bits: int, mantissa_bits: int, infinite: bool) -> tuple[float, ...]:
    """The value of each code. `infinite`: the top exponent is infinity and NaN; else only its last code is NaN."""
    bias, top = (1 << (exponent_bits - 1)) - 1, (1 << exponent_bits) - 1
    positive = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        fraction = mantissa / (1 << mantissa_bits)
        if exponent == top and infinite:
            positive.append(math.nan if mantissa else math.inf)
        elif exponent == top and mantissa == (1 << mantissa_bits) - 1:
            positive.append(math.nan)
        else:
            positive.append((1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias))
    return (*positive, *(-value for value in positive))


def _formats(name: str, dtype: str, largest: float, levels: tuple[float, ...]) -> list[Format]:
    common: dict[str, Any] = {"levels": levels, "dtype": dtype, "largest": largest}
    return [
        Float8(name=f"fp8_{name}_tensor", about=f"float8 {name}, one scale", tensor_wide=True, **common),
        Float8(name=f"fp8_{name}_channel", about=f"float8 {name}, scale per row", **common),
    ]


FORMATS = [
    *_formats("e4m3", "float8_e4m3fn", 448.0, values(4, 3, infinite=False)),
    *_formats("e5m2", "float8_e5m2", 57344.0, values(5, 2, infinite=True)),
]
