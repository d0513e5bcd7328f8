"""An example of a whole format in one file: 3-bit codes, 6-bit block scales. 3.25 bits per weight.

    super-block of 256, 104 bytes: d float16 @0, eight 6-bit scales[6] @2, codes[96] @8
    w = d * scale * (q - 4), scale 0..63 per 32 columns

Both bit fields are plain little-endian streams: field i begins at bit (width * i). Nothing else is needed: the
quantizer, the reference kernel, the benchmark, the command line and the contract tests find it. A native kernel is optional.
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
        from fewbits.formats.search import fit_scale, grouped, importance_like, in_row_chunks
        from fewbits.formats.search.superblocks import fit_two_level_scale

        assert self.levels
        levels, weight = self.levels, importance_like(w, importance, 32)

        def fit(rows: Tensor) -> Grid:
            x = grouped(rows, 32)
            wanted = fit_scale(x, levels, (3.0,), weight, how, store=lambda scale: scale)
            sub, d = fit_two_level_scale(x, levels, wanted, 8, range(64), weight, how)
            return {"sub": sub, "d": d}

        return in_row_chunks(fit, w)

    def affine(self, grid: Grid, columns: Columns = slice(None)) -> tuple[Tensor, Tensor | None]:
        from fewbits.formats.storage.codes import spread

        return spread(grid["d"].float().repeat_interleave(8, 1) * grid["sub"].float(), 32, columns), None

    def pack(self, codes: Tensor, grid: Grid) -> Parts:
        import torch

        from fewbits.formats.storage import bitfields, bitstream

        d, sub = bitfields.float16_bytes(grid["d"]).reshape(-1, 2), grid["sub"].to(torch.uint8).reshape(-1, 8)
        fields = [d, bitstream.pack(sub, 6), bitstream.pack(codes.reshape(-1, 256), 3)]
        return {"blocks": torch.cat(fields, -1).reshape(len(codes), -1)}

    def unpack(self, parts: Parts) -> tuple[Tensor, Grid]:
        import torch

        from fewbits.formats.storage import bitfields, bitstream

        d, sub, codes = (field.flatten(0, 1) for field in parts["blocks"].unflatten(1, (-1, 104)).split([2, 6, 96], -1))
        grid = {"sub": bitstream.unpack(sub, 6, 8).to(torch.int8), "d": bitfields.bytes_float16(d)}
        rows = len(parts["blocks"])
        return bitstream.unpack(codes, 3, 256).reshape(rows, -1), {name: entry.reshape(rows, -1) for name, entry in grid.items()}


FORMATS = [Q3S6(name="q3_s6", about="3 bits, 6-bit scales", levels=tuple(float(q) for q in range(-4, 4)), group=32, block=256)]
