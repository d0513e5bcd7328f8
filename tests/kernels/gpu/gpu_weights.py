"""Weights and activations to test GPU kernels with, and the bound that their products must keep."""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits.formats import Format
from fewbits.formats.storage.codes import scaled_values
from fewbits.kernels import reference
from fewbits.kernels.triton import repack
from fewbits.kernels.triton.layout import Planar

EPS = 2.0**-24  # half of float32's step: the error of one rounding


def packed(fmt: Format, shape: tuple[int, int], seed: int = 0) -> dict[str, Tensor]:
    """Random weights, quantized as the textbook has it, one row of nothing but zeros."""
    from fewbits.methods import rtn

    source = torch.Generator().manual_seed(seed)
    w = 0.05 * torch.randn(shape, generator=source)
    w[shape[0] // 2] = 0
    return rtn.quantize(w, fmt, how="max")


def planar(fmt: Format, parts: dict[str, Tensor]) -> Planar:
    return repack.repack(fmt, parts)


def activations(tokens: int, cols: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, cols, generator=source) * torch.rand(tokens, 1, generator=source).mul(6).exp2()
    x[:, 32:48] = 0
    return x.to(dtype)


def expected(fmt: Format, parts: dict[str, Tensor], x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """In float64, of the weight as the reference decodes it."""
    y = x.double() @ reference.decode(fmt, parts).double().T
    return y + (0 if bias is None else bias.double()) + (0 if residual is None else residual.double())


def rounding_of(dtype: torch.dtype, x: Tensor) -> Tensor:
    """The most that rounding x to this type can move it: half a step, and for small ones half of the smallest step of all."""
    info = torch.finfo(dtype)
    return torch.maximum(x.abs() * (info.eps / 2), torch.tensor(info.smallest_normal * info.eps / 2, dtype=torch.float64))


def magnitudes(fmt: Format, parts: dict[str, Tensor]) -> Tensor:
    """|scale * value| + |offset|: the terms of a weight, which may cancel."""
    codes, grid = fmt.unpack(parts)
    scale, offset = fmt.affine(grid)
    assert fmt.codebook
    w = scaled_values(fmt.codebook.values(codes), scale).double().abs()
    return w if offset is None else w + offset.double().abs()


def bound(fmt: Format, parts: dict[str, Tensor], x: Tensor, y: Tensor, weights_are_rounded: bool) -> Tensor:
    """cols + 8 additions of float32, each of numbers no larger than the sum of all |x||w|: so many roundings of EPS at most. For one token,
    scales and offsets multiply sums, so that |w| is what its terms are before they cancel. For tensor cores each weight is rounded to x's
    type before. The result is rounded to x's type in the end."""
    terms = magnitudes(fmt, parts)
    allowed = (x.shape[1] + 8) * EPS * (x.double().abs() @ terms.T + y.abs())
    if weights_are_rounded:
        allowed = allowed + x.double().abs() @ rounding_of(x.dtype, reference.decode(fmt, parts).double()).T
    return allowed + rounding_of(x.dtype, y.abs() + allowed)
