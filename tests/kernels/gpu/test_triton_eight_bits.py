# ruff: noqa: N803  (what is a constant of a compiled kernel is upper case)
"""Activations and weights of 8 bits in Triton's interpreter, against torch and the CPU's kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from gpu_weights import EPS, rounding_of

from fewbits import formats
from fewbits.formats.storage.codes import level_values
from fewbits.kernels import w8a8
from fewbits.kernels.triton import eight_bits, tile_shapes
from fewbits.kernels.triton.call import Call
from fewbits.kernels.triton.kernels import float8

HALVES = (torch.float16, torch.bfloat16)


@triton.jit
def rounded_to_e4m3(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, float8.to_e4m3(tl.load(x + at, mask=at < n, other=0.0)), mask=at < n)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_tokens_are_rounded_as_the_cpu_rounds_them() -> None:
    x = random(5, 300)
    x[1], x[2, 7], x[3, 5] = 0, torch.nan, -torch.inf
    x[4] *= 1e-38  # subnormal scales
    x = torch.cat([x, x[:1]])
    x[5] = torch.arange(300) - 149.5  # a scale of 1: every value lies in the middle of two codes
    x[5].clamp_(-126.5, 126.5)[0] = 127
    codes, scale = eight_bits.quantize_tokens(x)
    wanted, wanted_scale = w8a8.per_token(x)
    assert scale[5] == 1
    finite = [0, 1, 4, 5]
    assert torch.equal(codes[finite], wanted[finite]) and torch.equal(scale[finite], wanted_scale[finite])
    assert scale[2].isnan() and scale[3].isnan() and not codes[2:4].any()


@pytest.mark.parametrize("cols", [1, 96, 1000])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_norm_before_is_part_of_it(cols: int, dtype: torch.dtype) -> None:
    x, weight, eps = random(3, cols).to(dtype), random(cols, seed=1).to(dtype), 1e-5
    codes, scale = eight_bits.quantize_tokens(x, weight, eps)
    wide = x.double()
    y = wide / (wide.square().mean(1, keepdim=True) + eps).sqrt() * weight.double()
    largest = y.abs().amax(1)
    # the sum of squares has cols roundings, the rest six: of each value, relatively
    relative = (cols + 6) * EPS
    assert ((scale - largest / 127).abs() <= 2 * relative * largest / 127).all()
    # codes are within half a step of the value that they stand for, and what the value's error adds
    error = (codes.double() * scale.double().unsqueeze(1) - y).abs()
    assert (error <= (0.5 + 127 * 3 * relative) * scale.double().unsqueeze(1)).all()


@pytest.mark.parametrize("tokens, rows, cols", [(1, 5, 32), (3, 37, 96), (17, 70, 333), (65, 130, 64)])
def test_integer_products_are_exact_until_the_scales(tokens: int, rows: int, cols: int) -> None:
    source = torch.Generator().manual_seed(1)
    x, w = (torch.randint(-128, 128, (n, cols), dtype=torch.int8, generator=source) for n in (tokens, rows))
    x_scale, w_scale, bias = random(tokens).abs(), random(rows, seed=2).abs().half(), random(rows, seed=3)
    y = eight_bits.integer_matmul(x, x_scale, w, w_scale.unsqueeze(1), bias, torch.float32)
    wanted = w8a8.reference(x, x_scale, w, w_scale, bias)
    # one rounding may be left out where the last addition is fused; the product of three numbers is otherwise the same
    assert ((y - wanted).abs() <= 2 * EPS * (wanted.abs() + bias.abs())).all()


def test_the_largest_sums_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = replace(tile_shapes.choose("integer_product", "sm_80", 8, 1), width=4096)  # fewer steps for the interpreter
    monkeypatch.setattr(tile_shapes, "choose", lambda *_: wide)
    cols = eight_bits.MOST_COLUMNS
    x = torch.full((1, cols), -127, dtype=torch.int8)
    w = torch.full((1, cols), -128, dtype=torch.int8)
    y = eight_bits.integer_matmul(x, torch.ones(1), w, torch.ones(1, 1), dtype=torch.float32)
    assert y.item() == 127 * 128 * cols
    with pytest.raises(ValueError, match="65536"):
        eight_bits.integer_matmul(x.expand(1, -1).repeat(1, 2), torch.ones(1), w.repeat(1, 2), torch.ones(1, 1))


def test_every_float_is_rounded_to_e4m3_as_torch_does() -> None:
    """All codes, what lies between two of them, subnormals, both zeros, beyond the largest, infinities and NaN."""
    levels = level_values(formats.get("fp8_e4m3_channel").levels)[:127]
    between = (levels[1:] + levels[:-1]) / 2
    near = torch.cat([between, between.nextafter(torch.tensor(torch.inf)), between.nextafter(torch.tensor(-torch.inf)), levels])
    x = torch.cat([near, random(1000) * 100, torch.tensor([448.0, 464.0, 1e30, torch.inf, 1e-40, 0.0])])
    x = torch.cat([x, -x, torch.tensor([torch.nan])])
    found = torch.empty(len(x), dtype=torch.uint8)
    Call(rounded_to_e4m3, (1,), {"x": x, "out": found, "n": len(x)}, {"BLOCK": 4096}).run()
    wanted = torch.where(x.isnan(), x, x.clamp(-448, 448)).to(torch.float8_e4m3fn)
    assert torch.equal(found[:-1], wanted[:-1].view(torch.uint8)) and found[-1] & 0x7F == 0x7F


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("weights", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_products_of_every_code(weights: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_shapes, "multiplies_float8", lambda _: native)
    every = torch.arange(256).to(torch.uint8)
    codes = every[every.view(weights).float().isfinite()]
    w = codes.repeat(3)[: 2 * 242].reshape(2, 242).view(weights)
    x, x_scale = eight_bits.quantize_tokens_float8(random(3, 242).half())
    y = eight_bits.float8_matmul(x, x_scale, w, torch.tensor([[0.5], [3.0]]), random(2), torch.float32)
    scale = x_scale.double().unsqueeze(1) * torch.tensor([[0.5, 3.0]], dtype=torch.float64)
    exact = (x.double() @ w.double().T) * scale
    allowed = (242 + 6) * EPS * ((x.double().abs() @ w.double().abs().T) * scale + random(2).abs())
    assert ((y - exact - random(2).double()).abs() <= allowed).all()


def test_float8_tokens_are_the_nearest_codes() -> None:
    x = random(4, 100).bfloat16()
    x[1] = 0
    codes, scale = eight_bits.quantize_tokens_float8(x)
    assert torch.equal(scale, x.float().abs().amax(1) / 448)
    wanted = (x.float() / scale.masked_fill(scale == 0, torch.inf).unsqueeze(1)).to(torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))


def test_results_are_rounded_once_to_the_type_asked_for() -> None:
    x, w = (torch.randint(-9, 9, (4, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    for dtype in HALVES:
        y = eight_bits.integer_matmul(x, torch.ones(4), w, torch.full((4, 1), 0.1), None, dtype)
        exact = (x.double() @ w.double().T) * torch.tensor(0.1).double()
        assert ((y.double() - exact).abs() <= rounding_of(dtype, exact) * 1.0001).all()
