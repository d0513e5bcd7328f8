# ruff: noqa: ARG001  (a fake kernel has the arguments of its operator)
"""The kernels as torch operators, `torch.ops.fewbits.*`, which torch.compile and torch.export can put into a graph. On a CUDA or ROCm
device the Triton kernels run.

    matmul(x, parts, format, rows, bias, exact)                  x (..., cols) times a packed weight transposed
    decode(parts, format, rows, cols)                            a packed weight in float32
    w8a8(x, x_scale, w, w_scale, bias)                           int8 times int8
    w8a8_linear(x, w, w_scale, bias)                             the same with float activations, which it rounds per token
    planar_matmul(x, arrays, format, rows, bias, residual)       x times a weight in the GPU layout
    planar_decode(arrays, format, rows, cols, dtype)             a weight in the GPU layout, decoded

`parts` are the arrays of a format in the order of `Format.parts`, `arrays` those of `resident.Resident`. A weight that stays on a GPU is
repacked once and then multiplied by `planar_matmul`; `matmul` would repack it at every call. On the processor the planar operators need
Triton's interpreter. Importing this module registers all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits import formats, kernels
from fewbits.kernels import w8a8 as integers

_DEVICES = ("cpu", "cuda")  # cuda: ROCm's too


def arrays(parts: dict[str, Tensor], format: str) -> list[Tensor]:
    """A weight's parts in the order in which the operators take them."""
    return [parts[name] for name in formats.get(format).parts((1, formats.get(format).block))]


@torch.library.custom_op("fewbits::matmul", mutates_args=(), device_types=_DEVICES)
def matmul(x: Tensor, parts: list[Tensor], format: str, rows: int, bias: Tensor | None = None, exact: bool = False) -> Tensor:
    shape = rows, x.shape[-1]
    named = dict(zip(formats.get(format).parts(shape), parts, strict=True))
    out = kernels.bind(formats.get(format), shape, x.device).matmul(x.reshape(-1, shape[1]), named, shape, bias, exact)
    return out.reshape(*x.shape[:-1], rows)


@matmul.register_fake
def _(x: Tensor, parts: list[Tensor], format: str, rows: int, bias: Tensor | None = None, exact: bool = False) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


@torch.library.custom_op("fewbits::decode", mutates_args=(), device_types=_DEVICES)
def decode(parts: list[Tensor], format: str, rows: int, cols: int) -> Tensor:
    fmt = formats.get(format)
    out = kernels.decode(fmt, dict(zip(fmt.parts((rows, cols)), parts, strict=True)), (rows, cols))
    return out.clone() if any(out.data_ptr() == part.data_ptr() for part in parts) else out  # fp32 decodes to itself


@decode.register_fake
def _(parts: list[Tensor], format: str, rows: int, cols: int) -> Tensor:
    return parts[0].new_empty((rows, cols), dtype=torch.float32)


@torch.library.custom_op("fewbits::w8a8", mutates_args=(), device_types=_DEVICES)
def w8a8(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.device.type == "cpu":
        return integers.matmul(x, x_scale, w, w_scale, bias)
    from fewbits.kernels.triton import eight_bits

    return eight_bits.integer_matmul(x, x_scale, w, w_scale.reshape(-1, 1), bias, torch.float32)


@w8a8.register_fake
def _(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[0]), dtype=torch.float32)


@torch.library.custom_op("fewbits::w8a8_linear", mutates_args=(), device_types=_DEVICES)
def w8a8_linear(x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.device.type == "cpu":
        return integers.linear(x, w, w_scale, bias)
    from fewbits.kernels.triton import eight_bits

    return eight_bits.linear(x, w, w_scale, bias)


@w8a8_linear.register_fake
def _(x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[0]), dtype=torch.float32)


@torch.library.custom_op("fewbits::planar_matmul", mutates_args=(), device_types=_DEVICES)
def planar_matmul(
    x: Tensor, arrays: list[Tensor], format: str, rows: int, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    from fewbits.kernels.triton import layout, planar, repack

    return planar.multiply(x, layout.of_arrays(repack.of(formats.get(format)), (rows, x.shape[-1]), arrays), bias, residual)


@planar_matmul.register_fake
def _(x: Tensor, arrays: list[Tensor], format: str, rows: int, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


@torch.library.custom_op("fewbits::planar_decode", mutates_args=(), device_types=_DEVICES)
def planar_decode(arrays: list[Tensor], format: str, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    from fewbits.kernels.triton import layout, planar, repack

    return planar.decode(layout.of_arrays(repack.of(formats.get(format)), (rows, cols), arrays), dtype)


@planar_decode.register_fake
def _(arrays: list[Tensor], format: str, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    return arrays[0].new_empty((rows, cols), dtype=dtype)
