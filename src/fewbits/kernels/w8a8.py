"""int8 activations times int8 weights: sums in 32 bits, exact for all inputs; then a scale per token, a scale per row, and the bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fewbits.devices import processor

_ISAS = ("avx512", "avxvnni", "avx2", "neon", "scalar")
MOST_COLUMNS = 65536  # as in native/matmul/w8a8.h: sums of more columns could overflow 32 bits


def per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (tokens, cols) -> codes int8, scale (tokens,): a token's largest value gets code 127. A NaN or an infinity makes its scale NaN."""
    if (isa := processor.fastest(_ISAS)) is not None:
        wide = x.detach().float().contiguous()
        codes, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x))
        processor.native().quantize_tokens(isa, wide.numpy(), codes.numpy(), scale.numpy(), torch.get_num_threads())
        return codes, scale
    return per_token_by_torch(x)


def per_token_by_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    peak = x.float().abs().amax(1)
    scale = torch.where(peak.isfinite(), peak, torch.nan) / 127
    codes = (x.float() / scale.unsqueeze(1)).nan_to_num(0.0, 0.0, 0.0).round().clamp(-127, 127)
    return codes.to(torch.int8), scale


def linear(x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (tokens, cols) in float, which is rounded per token, times int8 weights."""
    return matmul(*per_token(x), w, w_scale, bias)


def matmul(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (tokens, cols) int8, w (rows, cols) int8 -> (tokens, rows) float32: (x @ w.T) * (x_scale * w_scale) + bias."""
    if x.shape[1] > MOST_COLUMNS:
        raise ValueError(f"sums of 32 bits hold {MOST_COLUMNS} products, not {x.shape[1]}")
    if (isa := processor.fastest(_ISAS)) is None:
        return reference(x, x_scale, w, w_scale, bias)
    out = torch.empty(len(x), len(w))

    def flat(values: Tensor) -> Any:
        return values.detach().float().flatten().contiguous().numpy()

    arrays = (x.detach().contiguous().numpy(), flat(x_scale), w.detach().contiguous().numpy(), flat(w_scale))
    processor.native().w8a8(isa, *arrays, None if bias is None else flat(bias), out.numpy(), torch.get_num_threads())
    return out


def reference(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    sums = (x.double() @ w.double().T).float()  # the sums are below 2^53 and so exact in float64; then they round once, as in the kernel
    out = sums * (x_scale.float().reshape(-1, 1) * w_scale.float().reshape(1, -1))
    return out if bias is None else out + bias.float()
