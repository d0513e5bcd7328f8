"""MLX's integers of 2 to 8 bits with a scale and a bias per group of columns, both in the float type of the model:

    w = scale * q + bias, q in 0 .. 2^bits - 1

    codes   a little-endian bit stream per row: column i begins at bit (bits * i). `mx.quantize` gives the same bytes as uint32
    scales  float16 or bfloat16 [rows, groups]
    biases  float16 or bfloat16 [rows, groups]

affine4_g64 has scales in float16, affine4_g64_bf16 in bfloat16: MLX multiplies a model of one type in that type, and falls back to
float32 where two types meet. Groups of 32, 64 and 128 are those that MLX has kernels for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats import Format, How, Shape, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Columns, Grid, Parts

_LEAST_SCALE = 1e-7  # that `mx.quantize` takes for a group of equal weights
_LONGEST_LINE = 128  # steps that the search for a line knows; with more, clipping gains little


@dataclass(frozen=True, kw_only=True)
class ScaleAndBias(Format):
    bits: int
    group: int
    dtype: str  # of scales and biases

    def parts(self, shape: Shape) -> dict[str, Spec]:
        rows, cols = shape
        groups = (rows, cols // self.group)
        codes = Spec("uint8", (rows, cols * self.bits // 8))
        return {"codes": codes, "scales": Spec(self.dtype, groups), "biases": Spec(self.dtype, groups)}

    def fit(self, w: Tensor, importance: Tensor | None = None, fixed: Grid | None = None, how: How = "search") -> Grid:
        from fewbits.formats.search import grouped, importance_like, in_row_chunks

        weight, top = importance_like(w, importance, self.group), (1 << self.bits) - 1

        def fit(rows: Tensor) -> Grid:
            x = grouped(rows, self.group)
            scales, biases = self._textbook(x, top) if how == "max" else self._searched(x, top, weight)
            return {"scales": self._stored(scales), "biases": self._stored(biases)}

        return in_row_chunks(fit, w)

    def affine(self, grid: Grid, columns: Columns = slice(None)) -> tuple[Tensor, Tensor | None]:
        from fewbits.formats.storage.codes import spread

        return spread(grid["scales"].float(), self.group, columns), spread(grid["biases"].float(), self.group, columns)

    def pack(self, codes: Tensor, grid: Grid) -> Parts:
        from fewbits.formats.storage import bitstream

        return {"codes": bitstream.pack(codes, self.bits), "scales": grid["scales"], "biases": grid["biases"]}

    def unpack(self, parts: Parts) -> tuple[Tensor, Grid]:
        from fewbits.formats.storage import bitstream

        stored = parts["codes"]
        codes = bitstream.unpack(stored, self.bits, stored.shape[1] * 8 // self.bits)
        return codes, {"scales": parts["scales"], "biases": parts["biases"]}

    def _stored(self, values: Tensor) -> Tensor:
        import torch

        from fewbits.formats.storage.codes import to_float16

        return to_float16(values) if self.dtype == "float16" else values.to(torch.bfloat16)

    def _textbook(self, x: Tensor, top: int) -> tuple[Tensor, Tensor]:
        """As `mx.quantize` does it: the end that is further from zero is exact, and so is zero."""
        import torch

        low, high = x.aminmax(dim=-1)
        below = low.abs() > high.abs()
        scale = ((high - low) / top).clamp(min=_LEAST_SCALE)
        scale, edge = torch.where(below, scale, -scale), torch.where(below, low, high)
        steps = (edge / scale).round()
        return torch.where(steps == 0, scale, edge / steps), torch.where(steps == 0, 0.0, edge)

    def _searched(self, x: Tensor, top: int, importance: Tensor | None) -> tuple[Tensor, Tensor]:
        """Lines near that of least squares, judged as they are stored: bfloat16 moves the last of 255 steps by half a step."""
        from fewbits.formats.search.trials import best_line

        trials = [self._textbook(x, top), *(_stretched(x, top) if top > _LONGEST_LINE else [_line(x, top, importance)])]
        if self.dtype == "bfloat16":
            scale, bias = trials[-1]
            trials += [(scale * (1 + 2.0**-8), bias), (scale * (1 - 2.0**-8), bias)]
        return best_line(x, top, trials, lambda values: self._stored(values).float(), importance)


def _line(x: Tensor, top: int, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    import torch

    from fewbits.formats.search import fit_scale_and_min

    unit = torch.exp2(torch.frexp(x.abs().amax(-1)).exponent.float().clamp(-96, 96))  # so that float16 has all its bits for a scale
    scale, minimum = fit_scale_and_min(x / unit.unsqueeze(-1), top, importance, float16=True)
    return scale * unit, -minimum * unit


def _stretched(x: Tensor, top: int) -> list[tuple[Tensor, Tensor]]:
    """Lines from the least to the largest weight, and a little beyond or within; the last is the plain one."""
    low, high = x.aminmax(dim=-1)
    lines = []
    for stretch in (-0.4, 0.4, 0.8, 0.0):
        scale = (high - low) / (top + stretch)
        lines.append((scale, low + scale * (stretch / 2)))
    return lines


def _format(bits: int, group: int, dtype: str) -> ScaleAndBias:
    return ScaleAndBias(
        name=f"affine{bits}_g{group}{'_bf16' if dtype == 'bfloat16' else ''}",
        about=f"{bits} bits, {'bf16 ' if dtype == 'bfloat16' else ''}scale and bias per {group}",
        levels=tuple(float(q) for q in range(1 << bits)),
        group=group,
        block=group,
        bits=bits,
        dtype=dtype,
    )


FORMATS = [_format(bits, group, dtype) for bits in (2, 3, 4, 5, 6, 8) for group in (128, 64, 32) for dtype in ("float16", "bfloat16")]
