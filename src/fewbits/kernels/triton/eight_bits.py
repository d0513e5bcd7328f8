"""Products of 8-bit activations with 8-bit weights: launches kernels/w8a8.py and kernels/float8.py.

quantize_tokens(x, norm_weight, eps)         x (tokens, cols) -> codes int8, scale (tokens,). With a norm_weight, the same kernel computes
                                             the RMSNorm before
integer_matmul(codes, scale, w, w_scale)     -> (tokens, rows); `linear` does both
quantize_tokens_float8(x), float8_matmul     the same with e4m3 activations and e4m3 or e5m2 weights
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewbits.errors import InputError
from fewbits.kernels.triton import tile_shapes
from fewbits.kernels.triton.call import Call
from fewbits.kernels.triton.device import Device, device_of
from fewbits.kernels.triton.kernels import float8, w8a8
from fewbits.kernels.w8a8 import MOST_COLUMNS, per_token_by_torch

MOST_OF_A_ROW = 32768  # columns of a row that is quantized: a program holds the whole row in registers


@dataclass(frozen=True)
class Product:
    """out (tokens, rows) = x @ w.T * x_scale * w_scale + bias; x (tokens, cols), w (rows, cols)."""

    x: Tensor
    x_scale: Tensor
    w: Tensor
    w_scale: Tensor
    bias: Tensor | None
    out: Tensor


def unsupported_row(cols: int) -> str | None:
    """Why a row cannot be quantized in one pass; None if it can."""
    return f"{cols} columns are more than the {MOST_OF_A_ROW} that a program holds" if cols > MOST_OF_A_ROW else None


def linear(x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (tokens, cols) in float, which is rounded per token, times int8 weights (rows, cols) -> (tokens, rows) float32. Rows too long for
    one program are rounded by torch, in the same steps."""
    if not len(x):
        return torch.empty((0, len(w)), device=x.device)
    codes, scale = quantize_tokens(x) if unsupported_row(x.shape[1]) is None else per_token_by_torch(x)
    return integer_matmul(codes, scale, w, w_scale.reshape(-1, 1), bias, torch.float32)


def quantize_tokens(x: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    codes, scale = torch.empty(x.shape, dtype=torch.int8, device=x.device), torch.empty(len(x), device=x.device)
    norm_call(x.contiguous(), None if norm_weight is None else norm_weight.contiguous(), eps, codes, scale).run()
    return codes, scale


def norm_call(x: Tensor, norm_weight: Tensor | None, eps: float, codes: Tensor, scale: Tensor) -> Call:
    block, warps = _whole_row(x.shape[1])
    arguments = {"x": x, "weight": norm_weight, "codes": codes, "scales": scale, "cols": x.shape[1], "eps": float(eps)}
    return Call(w8a8.norm_and_quantize, (len(x),), arguments, {"BLOCK": block}, warps)


def integer_matmul(
    codes: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.float16
) -> Tensor:
    out = torch.empty((len(codes), len(w)), dtype=dtype, device=codes.device)
    integer_call(Product(codes.contiguous(), scale, w.contiguous(), w_scale, bias, out), device_of(codes)).run()
    return out


def integer_call(product: Product, device: Device) -> Call:
    if product.x.shape[1] > MOST_COLUMNS:
        raise ValueError(f"sums of 32 bits hold {MOST_COLUMNS} products, not {product.x.shape[1]}")
    return _call(w8a8.integer_product, "integer_product", product, {}, device)


def quantize_tokens_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = torch.empty(x.shape, dtype=torch.uint8, device=x.device), torch.empty(len(x), device=x.device)
    float8_call(x.contiguous(), codes, scale).run()
    return codes.view(torch.float8_e4m3fn), scale


def float8_call(x: Tensor, codes: Tensor, scale: Tensor) -> Call:
    block, warps = _whole_row(x.shape[1])
    return Call(float8.quantize, (len(x),), {"x": x, "codes": codes, "scales": scale, "cols": x.shape[1]}, {"BLOCK": block}, warps)


def float8_matmul(
    codes: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.float16
) -> Tensor:
    out = torch.empty((len(codes), len(w)), dtype=dtype, device=codes.device)
    float8_product_call(Product(codes.contiguous(), scale, w.contiguous(), w_scale, bias, out), device_of(codes)).run()
    return out


def float8_product_call(product: Product, device: Device) -> Call:
    native = tile_shapes.multiplies_float8(device.architecture)
    constants = {"NATIVE": native, "W_IS_E5M2": product.w.dtype == torch.float8_e5m2}
    if not native:
        product = replace(product, x=product.x.view(torch.uint8), w=product.w.view(torch.uint8))
    return _call(float8.product, "float8_product", product, constants, device)


def _call(kernel: object, name: str, product: Product, constants: Mapping[str, object], device: Device) -> Call:
    tokens, (rows, cols) = len(product.x), product.w.shape
    tile = tile_shapes.choose(name, device.architecture, 8, tokens)
    arguments = vars(product) | {
        "x_scale": product.x_scale.reshape(-1).contiguous(),
        "w_scale": product.w_scale.expand(rows, 1).reshape(-1).contiguous(),
        "bias": None if product.bias is None else product.bias.contiguous(),
        "tokens": tokens, "rows": rows, "cols": cols,
    }  # fmt: skip
    shape = {"ROWS": tile.rows, "TOKENS": tile.tokens, "WIDTH": tile.width}
    grid = (-(-rows // tile.rows), -(-tokens // tile.tokens))
    return Call(kernel, grid, arguments, {**constants, **shape}, tile.warps, tile.stages)


def _whole_row(cols: int) -> tuple[int, int]:
    """(the row's length rounded up to a power of two, warps for 16 values per lane)"""
    if reason := unsupported_row(cols):
        raise InputError(f"no kernel quantizes such rows: {reason}", "quantize them with torch")
    block = 1 << max(7, (cols - 1).bit_length())
    return block, min(16, max(1, block // 512))
