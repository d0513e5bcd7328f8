# ruff: noqa: ARG001  (a fake kernel has the arguments of its operator)
"""The kernels as torch operators, `torch.ops.fewbits.*`, so that torch.compile and torch.export see through them.

    matmul(x, parts, format, rows, bias, exact)    x (..., cols) times a packed weight transposed
    decode(parts, format, rows, cols)              a packed weight in float32
    w8a8(x, x_scale, w, w_scale, bias)             int8 times int8

`parts` are the arrays of a format in the order of `Format.parts`. Importing this module registers them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits import formats, kernels
from fewbits.kernels import w8a8 as integers


def arrays(parts: dict[str, Tensor], format: str) -> list[Tensor]:
    """A weight's parts as the operators take them."""
    return [parts[name] for name in formats.get(format).parts((1, formats.get(format).block))]


@torch.library.custom_op("fewbits::matmul", mutates_args=(), device_types="cpu")
def matmul(x: Tensor, parts: list[Tensor], format: str, rows: int, bias: Tensor | None = None, exact: bool = False) -> Tensor:
    shape = rows, x.shape[-1]
    named = dict(zip(formats.get(format).parts(shape), parts, strict=True))
    out = kernels.bind(formats.get(format), shape).matmul(x.reshape(-1, shape[1]), named, shape, bias, exact)
    return out.reshape(*x.shape[:-1], rows)


@matmul.register_fake
def _(x: Tensor, parts: list[Tensor], format: str, rows: int, bias: Tensor | None = None, exact: bool = False) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


@torch.library.custom_op("fewbits::decode", mutates_args=(), device_types="cpu")
def decode(parts: list[Tensor], format: str, rows: int, cols: int) -> Tensor:
    fmt = formats.get(format)
    out = kernels.decode(fmt, dict(zip(fmt.parts((rows, cols)), parts, strict=True)), (rows, cols))
    return out.clone() if any(out.data_ptr() == part.data_ptr() for part in parts) else out  # fp32 decodes to itself


@decode.register_fake
def _(parts: list[Tensor], format: str, rows: int, cols: int) -> Tensor:
    return parts[0].new_empty((rows, cols), dtype=torch.float32)


@torch.library.custom_op("fewbits::w8a8", mutates_args=(), device_types="cpu")
def w8a8(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return integers.matmul(x, x_scale, w, w_scale, bias)


@w8a8.register_fake
def _(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[0]), dtype=torch.float32)
