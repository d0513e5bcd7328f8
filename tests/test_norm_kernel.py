"""Activations as int8, and RMSNorm that ends in them: every path gives the slow twin's bytes, and the norm is exact to three roundings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fewbits import kernels
from fewbits.errors import InputError
from fewbits.kernels import norm
from fewbits.kernels.norm import QuantizedRows

U = 2.0**-24  # half a unit in the last place of float32
PATHS = ("avx512", "avx2", "scalar", None)  # None: torch


@pytest.fixture(params=PATHS, ids=str)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    isa: str | None = request.param
    assert kernels.native_missing() is None
    if isa and isa not in kernels.native().norm_isas():
        pytest.skip(f"this processor has no {isa}")
    monkeypatch.setattr(norm, "_isa", lambda: isa)
    return isa


def slow_block(block: list[np.float32]) -> tuple[list[int], float]:
    """Codes and scale of up to 32 values, one by one."""
    largest = max(abs(value) for value in block)
    if not all(math.isfinite(value) for value in block):
        return [0] * len(block), math.nan
    scale = np.float32(largest) / np.float32(127)
    if scale == 0:
        return [0] * len(block), 0.0
    return [max(-127, min(127, round(float(value / scale)))) for value in block], float(scale)  # Python rounds halves to even


def slow_rows(x: Tensor) -> tuple[list[list[int]], list[list[float]], list[list[int]]]:
    codes, scales, sums = [], [], []
    for row in x.numpy():
        blocks = [slow_block(list(row[i : i + 32])) for i in range(0, len(row), 32)]
        q = [code for block, _ in blocks for code in block]
        q += [0] * (-len(q) % 32)
        codes.append(q)
        scales.append([scale for _, scale in blocks])
        sums.append([sum(q[i : i + 16]) for i in range(0, len(q), 16)])
    return codes, scales, sums


def inputs(rows: int, cols: int) -> Tensor:
    generator = torch.Generator().manual_seed(cols)
    return torch.randn(rows, cols, generator=generator) * torch.randn(rows, 1, generator=generator).mul(20).exp2()


def extremes() -> Tensor:
    """A block each of: zeros of both signs, ties, the largest float, subnormals that a scale is too coarse or too small for."""
    biggest, least = torch.finfo(torch.float32).max, 2.0**-149
    ties = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5] * 4)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (32,), generator=generator) * 2.0 - 1
    tiny = [torch.randint(0, most + 1, (32,), generator=generator) * signs * least for most in (1, 62, 64, 126, 190, 1000)]
    for values, most in zip(tiny, (1, 62, 64, 126, 190, 1000), strict=True):
        values[7] = most * least
    blocks = [torch.zeros(32), torch.zeros(32).neg(), ties, -ties, biggest * signs, ties * 1e36, ties * 1e-36, *tiny]
    return torch.cat(blocks).unsqueeze(0)


def assert_same(ours: QuantizedRows, x: Tensor) -> None:
    codes, scales, sums = slow_rows(x)
    assert ours.q.tolist() == codes
    np.testing.assert_array_equal(ours.scale.numpy(), np.array(scales, np.float32))  # NaN equals NaN
    assert ours.sums.tolist() == sums
    assert ours.columns == x.shape[1]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 31), (5, 32), (2, 33), (7, 100), (3, 577), (9, 4096)])
def test_codes_scales_and_sums_equal_the_slow_twin(rows: int, cols: int) -> None:
    x = inputs(rows, cols)
    assert_same(norm.quantize_rows(x), x)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("threads", [2, 7])
def test_threads_change_no_byte(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    x, weight = inputs(65, 2048), inputs(1, 2048)[0]  # enough for eight shares

    def everything() -> list[bytes]:
        codes, (normed, floats) = norm.quantize_rows(x), norm.rms_norm_with_floats(x, weight, 1e-6)
        return [part.numpy().tobytes() for rows in (codes, normed) for part in (rows.q, rows.scale, rows.sums)] + [floats.numpy().tobytes()]

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = everything()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert everything() == alone


@pytest.mark.usefixtures("path")
def test_extreme_values_equal_the_slow_twin() -> None:
    assert_same(norm.quantize_rows(extremes()), extremes())


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 40, 99])
def test_what_is_not_finite_is_not_hidden(what: float, at: int) -> None:
    x = inputs(2, 100)
    x[1, at] = what
    ours = norm.quantize_rows(x)
    assert_same(ours, x)
    assert ours.values()[1, at // 32 * 32 : at // 32 * 32 + 32].isnan().all()
    assert ours.values().isnan().sum() == min(32, 100 - at // 32 * 32)


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 17), (5, 576), (2, 1024), (3, 1100), (9, 4096)])
def test_the_norm_is_exact_to_three_roundings(rows: int, cols: int) -> None:
    x, weight = inputs(rows, cols), inputs(1, cols)[0]
    codes, floats = norm.rms_norm_with_floats(x, weight, 1e-6)
    exact = exact_norm(x, weight, 1e-6)
    # r, x * r and the product with the weight round once each; float64 on both sides adds less than cols * 2**-52
    bound = ((1 + U) ** 3 - 1 + cols * 2.0**-52) * exact.abs()
    assert ((floats.double() - exact).abs() <= bound).all()
    assert_same(codes, floats)
    alone = norm.rms_norm(x, weight, 1e-6)
    assert all(torch.equal(getattr(alone, part), getattr(codes, part)) for part in ("q", "scale", "sums"))


@pytest.mark.parametrize("cols", [5, 64, 577, 3000])
def test_every_path_gives_the_bits_of_torch(monkeypatch: pytest.MonkeyPatch, cols: int) -> None:
    x, weight = inputs(40, cols), inputs(1, cols)[0]
    monkeypatch.setattr(norm, "_isa", lambda: None)
    by_torch = norm.rms_norm_with_floats(x, weight, 1e-5)[1]
    for isa in kernels.native().norm_isas():
        monkeypatch.setattr(norm, "_isa", lambda isa=isa: isa)
        assert torch.equal(norm.rms_norm_with_floats(x, weight, 1e-5)[1], by_torch), isa


@pytest.mark.usefixtures("path")
def test_a_norm_of_what_is_not_finite_does_as_torch_does() -> None:
    x = inputs(3, 70)
    x[0, 3], x[1, 40] = math.nan, math.inf
    codes, floats = norm.rms_norm_with_floats(x, torch.ones(70), 1e-6)
    expected = torch.nn.functional.rms_norm(x, (70,), torch.ones(70), 1e-6)
    assert torch.equal(floats.isnan(), expected.isnan())
    assert codes.scale[0].isnan().all() and codes.scale[1].isnan().tolist() == [False, True, False]


def test_shapes_that_do_not_fit_are_refused(path: str | None) -> None:
    with pytest.raises(InputError, match="no rows"):
        norm.quantize_rows(torch.zeros(2, 3, 4))
    with pytest.raises(InputError, match="cannot have weights of shape"):
        norm.rms_norm(torch.zeros(2, 3), torch.ones(4), 1e-6)
    if path:
        x, scale = np.zeros((2, 40), np.float32), np.zeros((2, 2), np.float32)
        with pytest.raises(ValueError, match="`q` needs 2 x 64"):
            kernels.native().quantize_rows(path, x, np.zeros((2, 40), np.int8), scale, np.zeros((2, 4), np.int32), 1)


def test_the_environment_forces_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted, isa in (("reference", None), ("scalar", "scalar")):
        monkeypatch.setenv("FEWBITS_KERNEL", wanted)
        assert norm._isa() == isa
    monkeypatch.delenv("FEWBITS_KERNEL")
    assert norm._isa() == kernels.native().norm_isas()[0]
