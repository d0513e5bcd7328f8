"""A format of your own, whole in one file: 3-bit codes, 6-bit block scales. 3.25 bits per weight.

    super-block of 256, 104 bytes: d float16 @0, eight 6-bit scales[6] @2, codes[96] @8
    w = d * scale * (q - 4), scale 0..63 per 32 columns

Both bit fields are plain little-endian streams: field i begins at bit (width * i). Nothing outside this file knows the
format; the quantizer, the reference kernel, the benchmark, the command line and the contract tests find it by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats import Format, How, Shape, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Columns, Grid, Parts


@dataclass(frozen=True, kw_only=True)
class Q3S6(Format):
    def parts(self, shape: Shape) -> dict[str, Spec]:
        return {"blocks": Spec("uint8", (shape[0], shape[1] // 256 * 104))}

    def fit(self, w: Tensor, importance: Tensor | None = None, fixed: Grid | None = None, how: How = "search") -> Grid:
        from fewbits.fitting import fit_scale, grouped, importance_like, in_row_chunks
        from fewbits.fitting.superblocks import fit_two_level_scale

        assert self.levels
        levels, weight = self.levels, importance_like(w, importance, 32)

        def fit(rows: Tensor) -> Grid:
            x = grouped(rows, 32)
            wanted = fit_scale(x, levels, (3.0,), weight, how, store=lambda scale: scale)
            sub, d = fit_two_level_scale(x, levels, wanted, 8, range(64), weight, how)
            return {"sub": sub, "d": d}

        return in_row_chunks(fit, w)

    def affine(self, grid: Grid, columns: Columns = slice(None)) -> tuple[Tensor, Tensor | None]:
        from fewbits.rounding import spread

        return spread(grid["d"].float().repeat_interleave(8, 1) * grid["sub"].float(), 32, columns), None

    def pack(self, codes: Tensor, grid: Grid) -> Parts:
        import torch

        rows = len(codes)
        d = grid["d"].contiguous().view(torch.uint8).reshape(rows, -1, 2)
        scales = _to_stream(grid["sub"].to(torch.uint8).reshape(rows, -1, 8), 6)
        return {"blocks": torch.cat([d, scales, _to_stream(codes.reshape(rows, -1, 256), 3)], -1).reshape(rows, -1)}

    def unpack(self, parts: Parts) -> tuple[Tensor, Grid]:
        import torch

        rows = len(parts["blocks"])
        d, scales, codes = parts["blocks"].reshape(rows, -1, 104).split([2, 6, 96], -1)
        sub = _from_stream(scales, 6).to(torch.int8).reshape(rows, -1)
        d = d.clone(memory_format=torch.contiguous_format).view(torch.float16).squeeze(-1)
        return _from_stream(codes, 3).reshape(rows, -1), {"sub": sub, "d": d}


def _to_stream(fields: Tensor, width: int) -> Tensor:
    """(..., n) fields of `width` bits -> (..., n * width / 8) bytes."""
    import torch

    bits = (fields.unsqueeze(-1) >> torch.arange(width, dtype=torch.uint8)) & 1
    octets = bits.reshape(*fields.shape[:-1], -1, 8)
    return (octets << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8)


def _from_stream(stream: Tensor, width: int) -> Tensor:
    import torch

    bits = (stream.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    fields = bits.reshape(*stream.shape[:-1], -1, width)
    return (fields << torch.arange(width, dtype=torch.uint8)).sum(-1).to(torch.uint8)


FORMATS = [Q3S6(name="q3_s6", about="3 bits, 6-bit scales", levels=tuple(float(q) for q in range(-4, 4)), run=32, block=256)]
