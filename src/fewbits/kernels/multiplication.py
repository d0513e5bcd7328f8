"""Products with packed weights: on integers by the native kernels, or exactly, decoded a row or a few at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fewbits import kernels

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Parts, Shape
    from fewbits.kernels import Kernel

_DECODED = 1 << 18  # weights, as float32: what is decoded at a time stays in the second-level cache until it is multiplied
_FEW = 4  # tokens: up to these, to decode a row of weights and multiply it at once is faster than a library's product of many


def matmul(kernel: Kernel, x: Tensor, parts: Parts, shape: Shape, bias: Tensor | None, exact: bool) -> Tensor:
    if x.ndim != 2 or x.shape[1] != shape[1]:
        raise ValueError(f"x is {tuple(x.shape)}, the weight takes rows of {shape[1]} columns")
    exact = exact or not kernel.multiplies
    if exact and (kernel.backend == "reference" or len(x) > _FEW):
        return _exact(kernel, x, parts, shape, bias)
    multiplied = kernels.native().matmul_exact if exact else kernels.native().matmul
    out = x.new_empty((len(x), shape[0]), dtype=torch.float32)
    stored = [kernels._bytes(parts[name]) for name in kernel._needed().parts]
    into = (out.numpy(), None if bias is None else bias.detach().float().contiguous().numpy())
    wide = x.detach().float().contiguous().numpy()
    multiplied(kernel.format, kernel._isa, wide, stored, *into, torch.get_num_threads())
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
