"""MLX's formats against MLX itself: the same bytes, the same scales, the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from enumerated import one_of
from torch import Tensor

from fewbits import formats, kernels
from fewbits.formats.scale_and_bias import FORMATS, ScaleAndBias
from fewbits.methods import rtn
from fewbits.targets.mlx import schemes
from fewbits.targets.mlx.arrays import to_mlx, to_torch

mx: Any = pytest.importorskip("mlx.core")

SHAPE = (24, 256)
# 3, 5 and 6 bits straddle words of 32
FEW = one_of(sorted(FORMATS, key=lambda fmt: fmt.group != 64), stay=12)


def weights(dtype: str) -> Tensor:
    w = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)) * 0.03
    w[:4] = w[:4] ** 3 * 500  # heavy tails
    w[4, :128] = w[4, :128].abs()  # one-sided
    w[5] = 0.0
    return w.to(getattr(torch, dtype))


def by_mlx(w: Tensor, **how: Any) -> list[Any]:
    return list(mx.quantize(to_mlx(w), **how))


@pytest.mark.parametrize("fmt", FEW)
def test_codes_of_mlx_are_read_and_written_back_to_the_byte(fmt: ScaleAndBias) -> None:
    w = weights(fmt.dtype)
    words, scales, biases = by_mlx(w, group_size=fmt.group, bits=fmt.bits)
    stored = to_torch(words)
    parts = {"codes": stored.view(torch.uint8), "scales": to_torch(scales), "biases": to_torch(biases)}
    codes, grid = fmt.unpack(parts)
    assert all(torch.equal(ours, parts[name]) for name, ours in fmt.pack(codes, grid).items())
    wide = [array.astype(mx.float32) for array in (scales, biases)]  # in float16 `mx.dequantize` rounds
    decoded = to_torch(mx.dequantize(words, *wide, group_size=fmt.group, bits=fmt.bits))
    assert torch.equal(kernels.decode(fmt, parts, SHAPE), decoded)
    assert torch.equal(schemes.tensors(fmt, parts, torch.arange(SHAPE[0]))["weight"], stored)


@pytest.mark.parametrize("fmt", FEW)
def test_the_textbook_scales_are_those_of_mlx(fmt: ScaleAndBias) -> None:
    w = weights(fmt.dtype)
    _, scales, biases = by_mlx(w, group_size=fmt.group, bits=fmt.bits)
    grid = fmt.fit(w.float(), how="max")
    assert torch.equal(grid["scales"], to_torch(scales))
    assert torch.equal(grid["biases"], to_torch(biases))


@pytest.mark.parametrize("fmt", FEW)
def test_the_search_beats_the_rounding_of_mlx(fmt: ScaleAndBias) -> None:
    w = weights(fmt.dtype)
    words, scales, biases = by_mlx(w, group_size=fmt.group, bits=fmt.bits)
    wide = [array.astype(mx.float32) for array in (scales, biases)]
    theirs = to_torch(mx.dequantize(words, *wide, group_size=fmt.group, bits=fmt.bits))
    ours = kernels.decode(fmt, rtn.quantize(w.float(), fmt), SHAPE)
    assert (ours - w.float()).square().sum() < 0.95 * (theirs - w.float()).square().sum()


@pytest.mark.parametrize(
    "name",
    ["mxfp4", "nvfp4", "mxfp8", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "int2_g64", "int3_g128", "int4_g64", "int6_g32", "int8_g128"],
)
def test_formats_of_others_have_the_same_values_in_mlx(name: str) -> None:
    fmt, w = formats.get(name), weights("float16").float()
    scheme = schemes.of(fmt)
    assert isinstance(scheme, schemes.Scheme)
    parts = rtn.quantize(w, fmt)
    stored = schemes.tensors(fmt, parts, torch.arange(SHAPE[0]))
    wanted = {part: (array.dtype, array.shape) for part, array in scheme.arrays(SHAPE, "float16").items()}
    assert {part: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for part, tensor in stored.items()} == wanted
    scales = to_mlx(stored["scales"])
    how = {"group_size": scheme.group, "bits": scheme.bits, "mode": scheme.mode}
    if scheme.mode == "affine":
        arrays = (scales.astype(mx.float32), to_mlx(stored["biases"]).astype(mx.float32))
        decoded = mx.dequantize(to_mlx(stored["weight"]), *arrays, **how)
    else:
        decoded = mx.dequantize(to_mlx(stored["weight"]), scales, **how, dtype=mx.float32)
    assert torch.equal(to_torch(decoded), kernels.decode(fmt, parts, SHAPE))


@pytest.mark.parametrize("name", ["q4_k", "iq4_nl", "iq2_xs", "int4_g32_asym", "int4_channel", "nvfp4_tensor", "fp8_e4m3_channel", "tq2_0"])
def test_what_mlx_cannot_hold_is_said(name: str) -> None:
    assert isinstance(schemes.of(formats.get(name)), str)
