"""Who multiplies with a weight on a GPU: these kernels, or torch with the weight decoded where they cannot, with the reason why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fewbits import kernels
from fewbits.formats import Format, Shape
from fewbits.kernels import triton
from fewbits.kernels.triton.layout import Planar

if TYPE_CHECKING:
    from fewbits.formats import Parts


@dataclass(frozen=True)
class Bound:
    format: Format
    shape: Shape
    device: torch.device
    dtype: torch.dtype
    backend: Literal["triton", "torch"]
    reason: str | None  # why not triton

    def prepare(self, parts: Parts) -> Planar | Tensor:
        """The weight as `matmul` takes it, on the device: once, when it is loaded."""
        if self.backend == "triton":
            return triton.prepare(self.format, parts, self.device)
        return kernels.decode(self.format, parts, self.shape).to(self.device, self.dtype)

    def matmul(self, x: Tensor, weight: Planar | Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """x (tokens, cols) -> (tokens, rows)"""
        if isinstance(weight, Planar):
            return triton.matmul(x, weight, bias, residual)
        out = torch.nn.functional.linear(x, weight, bias)
        return out if residual is None else out + residual


def bind(fmt: Format, shape: Shape, device: torch.device | str, dtype: torch.dtype = torch.float16) -> Bound:
    own = torch.device(device)
    reason = triton.supports(fmt, shape, str(dtype).removeprefix("torch."))
    if reason is None:
        reason = triton.runs_here() if own.type == "cuda" else f"the weight is for {own.type}, not for a GPU"
    return Bound(fmt, shape, own, dtype, "torch" if reason else "triton", reason)
