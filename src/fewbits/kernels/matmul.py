"""Products with packed weights: in integers by the native kernels, or exact, with a few rows of weights decoded at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fewbits.devices import processor
from fewbits.kernels.arrays import as_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Parts, Shape
    from fewbits.kernels import Kernel

_DECODED = 1 << 18  # weights decoded at a time: as float32 they stay in the second-level cache until they are multiplied
_FEW = 4  # tokens: up to here, decoding and multiplying row by row is faster than decoding many rows for a library's product


def matmul(kernel: Kernel, x: Tensor, parts: Parts, shape: Shape, bias: Tensor | None, exact: bool) -> Tensor:
    if x.ndim != 2 or x.shape[1] != shape[1]:
        raise ValueError(f"x is {tuple(x.shape)}, the weight takes rows of {shape[1]} columns")
    exact = exact or not kernel.multiplies
    if exact and (kernel.backend == "reference" or len(x) > _FEW):
        return _exact(kernel, x, parts, shape, bias)
    multiply = processor.native().matmul_exact if exact else processor.native().matmul
    out = x.new_empty((len(x), shape[0]), dtype=torch.float32)
    stored = [as_bytes(parts[name]) for name in kernel.entry_here().parts]
    into = (out.numpy(), None if bias is None else bias.detach().float().contiguous().numpy())
    wide = x.detach().float().contiguous().numpy()
    multiply(kernel.format, kernel.isa, wide, stored, *into, torch.get_num_threads())
    return out.to(x.dtype)


def _exact(kernel: Kernel, x: Tensor, parts: Parts, shape: Shape, bias: Tensor | None) -> Tensor:
    rows, cols = shape
    step = max(16, _DECODED // max(1, cols))
    wide = x.float()
    if rows <= step:
        out = wide @ kernel.decode(parts, shape).T
    else:
        out = wide.new_empty((len(x), rows))
        for first in range(0, rows, step):
            some = {name: part if len(part) != rows else part[first : first + step] for name, part in parts.items()}
            w = kernel.decode(some, (min(step, rows - first), cols))
            out[:, first : first + step] = wide @ w.T
    return (out if bias is None else out + bias.float()).to(x.dtype)
