"""Weights that are multiplied as integers, with inputs rounded by a scale found beforehand: QuantizeLinear and DequantizeLinear (QDQ).

    x ---- Clip ---- QuantizeLinear ---- DequantizeLinear --.
                                                             MatMul ---- y
    codes, scales, zeros -------------- DequantizeLinear ---'

ONNX Runtime makes one integer product of it (MatMulIntegerToFloat); without graph optimizations it multiplies the same values in float32.

    codes        uint8 [cols, rows], as MatMul reads them: a Transpose in between would keep the two from being fused
    scales       float32 [rows]
    zeros        uint8 [rows], the code that stands for zero: 128 where the format is symmetric
    input_scale  float32 [], input_zero uint8 []; input_low float32 []: the least value that a symmetric activation can say

Both sides are unsigned. With int8 weights ONNX Runtime 1.31 uses vpmaddubsw on x86 without VNNI, which adds two products in 16 bits and
saturates: 127 * 127 in all of 256 columns gives 32640 instead of 4129024 in an emulated Haswell, from two rows of inputs on. For uint8
weights its kernels widen first. That costs speed where there is VNNI, which it uses for int8 weights alone: 7.5 ms instead of 2.5 for 128
rows and 2048 x 2048 weights, 0.39 instead of 0.24 for one row (MatMulNBits with 8 bits 5.1 and 0.33, float32 7.9 and 1.06). A file that
is right on every processor comes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fewbits.formats import Spec

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Format, Parts, Shape
    from fewbits.formats.runtime.activations import Activation

_AROUND_ZERO, _FROM_ZERO = (tuple(float(q) for q in range(first, first + 256)) for first in (-128, 0))
_ANY = (256, 256)  # a shape that every format fits
_MIDDLE = 128  # what a signed code becomes unsigned by


def refuses(fmt: Format) -> str | None:
    """Why weights in this format cannot be multiplied as integers; None if they can."""
    if fmt.levels == _AROUND_ZERO or (fmt.levels == _FROM_ZERO and "zeros" in fmt.parts(_ANY)):
        return None if fmt.group is None else f"{fmt.name} has a scale per {fmt.group} columns; integers need one for all columns of a row"
    return f"{fmt.name} is not stored as 8-bit integers; int8_channel is"


def refuses_activation(activation: Activation) -> str | None:
    if not activation.static:
        return "QuantizeLinear needs a scale found beforehand"
    if activation.format != "int8":
        return f"ONNX Runtime has no product of {activation.format} on a CPU"
    return None


def specs(shape: Shape, activation: Activation) -> dict[str, Spec]:
    rows, cols = shape
    weight = {"codes": Spec("uint8", (cols, rows)), "scales": Spec("float32", (rows,)), "zeros": Spec("uint8", (rows,))}
    return weight | input_specs(activation)


def input_specs(activation: Activation) -> dict[str, Spec]:
    low = {"input_low": Spec("float32", ())} if activation.symmetric else {}
    return {"input_scale": Spec("float32", ()), "input_zero": Spec("uint8", ())} | low


def arrays(fmt: Format, shape: Shape, activation: Activation, parts: Parts) -> dict[str, Tensor]:
    codes, scales, zeros = channels(fmt, shape, parts)
    return {"codes": codes.T, "scales": scales, "zeros": zeros} | input_arrays(activation)


def channels(fmt: Format, shape: Shape, parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned codes (rows, cols), and the scale and the code of zero of each row."""
    rows = shape[0]
    codes, grid = fmt.unpack(parts)
    scales, offset = fmt.affine(grid, slice(0, 1))
    scales = scales.expand(rows, 1)
    if offset is None:
        zeros = codes.new_full((rows, 1), _MIDDLE)
    else:  # -scale * zero, without rounding: see formats/affine.py
        zeros = (-offset.expand(rows, 1) / scales.masked_fill(scales == 0, 1.0)).to(codes.dtype)
    return codes, scales[:, 0].contiguous(), zeros[:, 0].contiguous()


def input_arrays(activation: Activation) -> dict[str, Tensor]:
    import torch

    from fewbits.formats.runtime.activations import static_scale

    scale = torch.tensor(static_scale(activation), dtype=torch.float32)
    arrays = {"input_scale": scale, "input_zero": torch.tensor(activation.zero + _MIDDLE, dtype=torch.uint8)}
    # QuantizeLinear would go on to -128, which a symmetric activation leaves out
    return arrays | ({"input_low": -activation.largest * scale} if activation.symmetric else {})
