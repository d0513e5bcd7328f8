"""Activations as int8 for integer matmuls, and RMSNorm with that as its result, in one pass.

native/activations.h says what the codes are, native/norm.cc in which order squares are added; torch gives the same bits here, slowly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits import kernels
from fewbits.errors import InputError

BLOCK, SUM = 32, 16  # columns under one scale, and under one sum
_LANES = 16  # of the sum of squares


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of int8: x is about scale * q. A block with a NaN or an infinity has scale NaN, so that nothing computed from it hides it."""

    columns: int  # of x; q is padded with zeros to whole blocks
    q: Tensor  # (rows, padded) int8, -127 to 127
    scale: Tensor  # (rows, padded / 32) float32
    sums: Tensor  # (rows, padded / 16) int32, of q

    def values(self) -> Tensor:  # (rows, columns) float32
        blocks: Tensor = self.q.float().unflatten(1, (-1, BLOCK)) * self.scale.unsqueeze(2)
        return blocks.flatten(1)[:, : self.columns]


def quantize_rows(x: Tensor) -> QuantizedRows:  # (rows, columns) float32
    x = _rows(x)
    isa = _isa()
    if isa is None:
        return _quantized(x)
    into = _empty(x)
    kernels.native().quantize_rows(isa, x.numpy(), into.q.numpy(), into.scale.numpy(), into.sums.numpy(), torch.get_num_threads())
    return into


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> QuantizedRows:  # (rows, columns), (columns,) float32
    """x / sqrt(mean(x^2) + eps) * weight, quantized; the floats themselves are never written."""
    return _normed(x, weight, eps, None)


def rms_norm_with_floats(x: Tensor, weight: Tensor, eps: float) -> tuple[QuantizedRows, Tensor]:
    """The same, and the floats that were quantized."""
    y = torch.empty_like(_rows(x))
    return _normed(x, weight, eps, y), y


def _normed(x: Tensor, weight: Tensor, eps: float, y: Tensor | None) -> QuantizedRows:
    x, weight = _rows(x), weight.detach().float().contiguous()
    if weight.shape != (x.shape[1],):
        raise InputError(f"a norm of {x.shape[1]} columns cannot have weights of shape {tuple(weight.shape)}", "it has one for each column")
    isa = _isa()
    if isa is None:
        normed = _by_torch(x, weight, eps)
        if y is not None:
            y.copy_(normed)
        return _quantized(normed)
    into = _empty(x)
    kernels.native().rms_norm(
        isa, x.numpy(), weight.numpy(), eps, into.q.numpy(), into.scale.numpy(), into.sums.numpy(), None if y is None else y.numpy(),
        torch.get_num_threads(),
    )  # fmt: skip
    return into


def _by_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    columns = x.shape[1]
    squares: Tensor = torch.nn.functional.pad(x.double().square(), (0, -columns % _LANES)).unflatten(1, (-1, _LANES))
    lanes = squares.new_zeros(len(x), _LANES)
    for sixteen in squares.unbind(1):
        lanes += sixteen
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return x * (1 / (lanes / columns + eps).sqrt()).float() * weight


def _quantized(x: Tensor) -> QuantizedRows:
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(2, keepdim=True)
    scale = (largest / 127).masked_fill(~largest.isfinite(), math.nan)
    # a scale that is 0 or NaN has no codes; beyond 127 comes what a subnormal scale is too coarse for
    codes = (blocks / scale).round().clamp(-127, 127).masked_fill(~(scale > 0), 0)
    q = codes.to(torch.int8).flatten(1)
    return QuantizedRows(x.shape[1], q, scale.squeeze(2), q.unflatten(1, (-1, SUM)).sum(2, dtype=torch.int32))


def _rows(x: Tensor) -> Tensor:
    if x.ndim != 2 or x.shape[1] == 0:
        raise InputError(f"activations of shape {tuple(x.shape)} are no rows", "flatten them to (rows, columns)")
    return x.detach().float().contiguous()


def _empty(x: Tensor) -> QuantizedRows:
    rows, columns = x.shape
    padded = -(-columns // BLOCK) * BLOCK
    return QuantizedRows(
        columns, torch.empty(rows, padded, dtype=torch.int8), torch.empty(rows, padded // BLOCK),
        torch.empty(rows, padded // SUM, dtype=torch.int32),
    )  # fmt: skip


def _isa() -> str | None:
    """The fastest native kernel here, or the one that FEWBITS_KERNEL forces; None: torch."""
    return kernels.fastest([] if kernels.native_missing() else kernels.native().norm_isas())
