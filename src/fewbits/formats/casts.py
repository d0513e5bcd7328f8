"""Plain casts, without codes or scales: for weights that no quantized format fits, or that are not to be quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats import Format, How, Shape, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Columns, Grid, Parts


@dataclass(frozen=True, kw_only=True)
class Cast(Format):
    levels: None = None
    group: None = None
    dtype: str

    def parts(self, shape: Shape) -> dict[str, Spec]:
        return {"values": Spec(self.dtype, shape)}

    def fit(self, w: Tensor, importance: Tensor | None = None, fixed: Grid | None = None, how: How = "search") -> Grid:
        return {}

    def affine(self, grid: Grid, columns: Columns = slice(None)) -> tuple[Tensor, Tensor | None]:
        import torch

        return torch.ones(()), None

    def pack(self, codes: Tensor, grid: Grid) -> Parts:
        import torch

        from fewbits.formats.storage.codes import to_float16

        return {"values": to_float16(codes) if self.dtype == "float16" else codes.to(getattr(torch, self.dtype))}

    def unpack(self, parts: Parts) -> tuple[Tensor, Grid]:
        return parts["values"], {}


FORMATS = [
    Cast(name="fp32", about="as trained, 4 bytes", dtype="float32"),
    Cast(name="fp16", about="half precision, to 65504", dtype="float16"),
    Cast(name="bf16", about="float32's range, 8 bits", dtype="bfloat16"),
]
