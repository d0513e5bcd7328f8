"""Packs, multiplies and decodes weights in the GPU layout. Triton computes float16 and bfloat16 products, torch float32 ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits.kernels.triton import repack
from fewbits.kernels.triton.device import device_of
from fewbits.kernels.triton.tooling import shipped

if TYPE_CHECKING:
    from fewbits.formats import Format, Parts
    from fewbits.kernels.triton.layout import Planar


def packed(fmt: Format, parts: Parts, device: torch.device | str | None = None) -> Planar:
    """In the GPU layout; on the device of the parts if none is given."""
    where = next(iter(parts.values())).device if device is None else device
    weight = repack.repack(fmt, parts).to(where)
    if weight.arrays[0].device.type == "cuda":
        shipped.seed_from_environment(device_of(weight.arrays[0]).architecture)
    return weight


def multiply(x: Tensor, weight: Planar, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x (..., cols) of any float type and memory layout -> (..., rows). torch multiplies float32 with the decoded weight."""
    rows, cols = weight.shape
    flat = x.reshape(-1, cols).contiguous()
    added = None if residual is None else residual.reshape(-1, rows).contiguous()
    if flat.dtype in (torch.float16, torch.bfloat16):
        from fewbits.kernels.triton import linear  # imports Triton, which need not be installed where this module is loaded

        out = linear.matmul(flat, weight, None if bias is None else bias.contiguous(), added)
    else:
        out = torch.nn.functional.linear(flat, decode(weight, flat.dtype), None if bias is None else bias.to(flat.dtype))
        out = out if added is None else out + added
    return out.reshape(*x.shape[:-1], rows)


def decode(weight: Planar, dtype: torch.dtype) -> Tensor:
    if 0 in weight.shape:
        return torch.empty(weight.shape, dtype=dtype, device=weight.arrays[0].device)
    from fewbits.kernels.triton import linear

    return linear.decode(weight, dtype)
