# ruff: noqa: N803  (what is a constant of a compiled kernel is upper case)
"""The mended interpreter: every code of every type that it used to cast wrongly, against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

TYPES = {
    "bf16": (torch.bfloat16, ml_dtypes.bfloat16), "e4m3": (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    "e5m2": (torch.float8_e5m2, ml_dtypes.float8_e5m2),
}  # fmt: skip


@triton.jit
def cast(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n).to(out.dtype.element_ty), mask=at < n)


@triton.jit
def add(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) + tl.load(x + at))


@triton.jit
def product(a, b, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def through(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(len(x), dtype=dtype)
    cast[(-(-len(x) // 4096),)](x, out, len(x), BLOCK=4096)
    return out


def bits(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.uint16 if x.element_size() == 2 else torch.uint8).numpy()


@pytest.mark.parametrize("name", TYPES)
def test_every_float16_is_cast_as_ml_dtypes_casts_it(name: str) -> None:
    dtype, judge = TYPES[name]
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    with np.errstate(all="ignore"):
        values = every.float().numpy()
        if name != "bf16":  # GPUs saturate, infinities too; ml_dtypes overflows
            largest = float(ml_dtypes.finfo(judge).max)
            values = np.where(np.isnan(values), values, np.clip(values, -largest, largest))
        wanted = values.astype(judge)
    found = through(every, dtype)
    same = (bits(found) == wanted.view(np.uint16 if name == "bf16" else np.uint8)) | (
        np.isnan(wanted.astype(np.float32)) & found.float().isnan().numpy()
    )
    assert same.all()


@pytest.mark.parametrize("name", TYPES)
def test_every_code_is_cast_back_to_what_it_is(name: str) -> None:
    dtype, judge = TYPES[name]
    codes = np.arange(65536 if name == "bf16" else 256).astype(np.uint16 if name == "bf16" else np.uint8)
    found = through(torch.from_numpy(codes).view(dtype), torch.float32)
    assert np.array_equal(found.numpy(), codes.view(judge).astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("name", TYPES)
def test_float32_rounds_to_even(name: str) -> None:
    """Two neighbours and all that lies between, in sixteenths of a step."""
    dtype, judge = TYPES[name]
    codes = np.arange(1, 120 if name != "bf16" else 32000, 1 if name != "bf16" else 371).astype(np.uint16 if name == "bf16" else np.uint8)
    low = codes.view(judge).astype(np.float32)
    step = (codes + codes.dtype.type(1)).view(judge).astype(np.float32) - low
    values = (low[:, None] + step[:, None] * np.arange(16, dtype=np.float32) / 16).ravel()
    found = through(torch.from_numpy(values), dtype)
    assert np.array_equal(bits(found), values.astype(judge).view(codes.dtype))


@pytest.mark.parametrize("name", TYPES)
def test_a_product_is_that_of_the_values(name: str) -> None:
    dtype, _ = TYPES[name]
    a, b = (torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    out = torch.empty(16, 16)
    product[(1,)](a, b, out, N=16)
    exact = a.double() @ b.double()
    assert ((out - exact).abs() <= 2.0**-24 * exact.abs()).all()


@triton.jit
def copy(x, out, first, n, BLOCK: tl.constexpr):
    at = first + tl.arange(0, BLOCK)
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + at, mask=at < n, other=0.0), mask=tl.arange(0, BLOCK) < n)


def test_memory_outside_of_the_arrays_is_refused() -> None:
    """By one element, at both ends, in loads and stores; and a view's own memory is its own, whatever lies around it."""
    whole = torch.arange(64.0)
    x, out = whole[16:32], torch.empty(16)
    copy[(1,)](x, out, 0, 16, BLOCK=32)
    assert torch.equal(out, x)
    for first, n in ((0, 17), (-1, 16)):
        with pytest.raises(Exception, match=r"1 of 1[67] addresses lie outside"):
            copy[(1,)](x, torch.empty(64), first, n, BLOCK=16 if first else 32)
    with pytest.raises(Exception, match="addresses lie outside"):
        copy[(1,)](x, out[:15], 0, 16, BLOCK=32)


@pytest.mark.parametrize("name", TYPES)
def test_arithmetic_on_bits_is_refused(name: str) -> None:
    x = torch.ones(16).to(TYPES[name][0])
    with pytest.raises(Exception, match="cast to float32 first"):
        add[(1,)](x, torch.empty_like(x), BLOCK=16)
