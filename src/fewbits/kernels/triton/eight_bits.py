"""Activations and weights of 8 bits: the calls of w8a8.py and float8.py.

quantize_tokens(x, norm_weight, eps)         x (tokens, cols) -> codes int8, scale (tokens,); the RMSNorm before it, if there is
                                             one, in the same kernel
integer_matmul(codes, scale, w, w_scale)     -> (tokens, rows); `linear` is both in turn
quantize_tokens_float8(x), float8_matmul     the same with e4m3 activations and e4m3 or e5m2 weights
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fewbits.errors import InputError
from fewbits.kernels.triton import float8, tiles, w8a8
from fewbits.kernels.triton.calling import Call
from fewbits.kernels.triton.devices import Device, device_of

MOST_COLUMNS = 65536  # of an integer product: the sums of more could pass 32 bits
MOST_OF_A_ROW = 32768  # of a norm: a program holds the row in registers


def unsupported_row(cols: int) -> str | None:
    """Why a row cannot be quantized in one pass; None if it can."""
    return f"{cols} columns are more than the {MOST_OF_A_ROW} that a program holds" if cols > MOST_OF_A_ROW else None


def linear(x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (tokens, cols) in float times int8 weights (rows, cols) -> (tokens, rows) float32, rounded per token on the way. Rows too long for
    one program are rounded by torch, in the same steps."""
    if not len(x):
        return torch.empty((0, len(w)), device=x.device)
    if unsupported_row(x.shape[1]) is None:
        codes, scale = quantize_tokens(x)
    else:
        codes, scale = _rounded_by_torch(x)
    return integer_matmul(codes, scale, w, w_scale.reshape(-1, 1), bias, torch.float32)


def _rounded_by_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    peak = x.float().abs().amax(1)
    scale = torch.where(peak.isfinite(), peak, torch.nan) / 127
    codes = (x.float() / scale.unsqueeze(1)).nan_to_num(0.0, 0.0, 0.0).round().clamp(-127, 127)
    return codes.to(torch.int8), scale


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
    integer_call(codes.contiguous(), scale, w.contiguous(), w_scale, bias, out, device_of(codes)).run()
    return out


def integer_call(codes: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, out: Tensor, device: Device) -> Call:
    if codes.shape[1] > MOST_COLUMNS:
        raise ValueError(f"sums of 32 bits hold {MOST_COLUMNS} products, not {codes.shape[1]}")
    return _product(w8a8.integer_product, "integer_product", codes, scale, w, w_scale, bias, out, {}, device)


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
    float8_product_call(codes.contiguous(), scale, w.contiguous(), w_scale, bias, out, device_of(codes)).run()
    return out


def float8_product_call(codes: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, out: Tensor, device: Device) -> Call:
    native = tiles.multiplies_float8(device.architecture)
    constants = {"NATIVE": native, "W_IS_E5M2": w.dtype == torch.float8_e5m2}
    operands = (codes, w) if native else (codes.view(torch.uint8), w.view(torch.uint8))
    return _product(float8.product, "float8_product", operands[0], scale, operands[1], w_scale, bias, out, constants, device)


def _product(
    kernel: object, name: str, x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, out: Tensor,
    constants: Mapping[str, object], device: Device,
) -> Call:  # fmt: skip
    tokens, (rows, cols) = len(x), w.shape
    tile = tiles.choose(name, device.architecture, 8, tokens)
    scales = (x_scale.reshape(-1).contiguous(), w_scale.expand(rows, 1).reshape(-1).contiguous())
    bias = None if bias is None else bias.contiguous()
    arguments = {
        "x": x, "x_scale": scales[0], "w": w, "w_scale": scales[1], "bias": bias, "out": out, "tokens": tokens, "rows": rows, "cols": cols,
    }  # fmt: skip
    shape = {"ROWS": tile.rows, "TOKENS": tile.tokens, "WIDTH": tile.width}
    grid = (-(-rows // tile.rows), -(-tokens // tile.tokens))
    return Call(kernel, grid, arguments, {**constants, **shape}, tile.warps, tile.stages)


def _whole_row(cols: int) -> tuple[int, int]:
    """(a power of two, warps: 16 values per lane)"""
    if reason := unsupported_row(cols):
        raise InputError(f"no kernel quantizes such rows: {reason}", "quantize them with torch")
    block = 1 << max(7, (cols - 1).bit_length())
    return block, min(16, max(1, block // 512))
