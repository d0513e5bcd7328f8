"""Who multiplies on which device, and the benchmark that times it: on the CPU, with a clock of its own, as far as that goes."""

from __future__ import annotations

import pytest
import torch
from gpu_weights import packed

from fewbits import formats, kernels
from fewbits.kernels import triton as gpu
from fewbits.kernels.triton import binding, measuring
from fewbits.kernels.triton.layout import Planar


def test_without_a_gpu_torch_multiplies_and_says_why() -> None:
    fmt, shape = formats.get("q4_k"), (8, 256)
    bound = binding.bind(fmt, shape, "cpu", torch.bfloat16)
    assert bound.backend == "torch" and bound.reason == "the weight is for cpu, not for a GPU"
    parts = packed(fmt, shape)
    x, bias, residual = torch.randn(3, 256).bfloat16(), torch.randn(8).bfloat16(), torch.randn(3, 8).bfloat16()
    weight = bound.prepare(parts)
    wanted = torch.nn.functional.linear(x, kernels.decode(fmt, parts, shape).bfloat16(), bias) + residual
    assert torch.equal(bound.matmul(x, weight, bias, residual), wanted)


@pytest.mark.parametrize("name, dtype, reason", [("bf16", torch.float16, "is a cast"), ("q4_0", torch.float32, "activations are float32")])
def test_what_the_kernels_do_not_take_goes_to_torch(name: str, dtype: torch.dtype, reason: str) -> None:
    bound = binding.bind(formats.get(name), (8, 64), "cuda", dtype)
    assert bound.backend == "torch" and reason in str(bound.reason)


def test_on_a_gpu_the_kernels_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "runs_here", lambda: None)
    fmt, shape = formats.get("q4_0"), (8, 64)
    bound = binding.bind(fmt, shape, "cuda")
    assert bound.backend == "triton" and bound.reason is None
    here = binding.Bound(fmt, shape, torch.device("cpu"), torch.float16, "triton", None)
    weight = here.prepare(packed(fmt, shape))
    assert isinstance(weight, Planar) and here.matmul(torch.randn(1, 64).half(), weight).shape == (1, 8)


def test_contenders_are_checked_and_timed_in_turn() -> None:
    order: list[int] = []

    def clock(run: object, calls: int) -> float:
        order.append(id(run))
        return 1e-6 * calls

    rows = measuring.measure(formats.get("int4_g64"), (16, 128), 1, device="cpu", rounds=3, clock=clock)
    assert [row.name for row in rows][:2] == ["fewbits triton", "torch"] and all(row.problem is None for row in rows[:2])
    assert order[:2] * 3 == order[:6] and rows[0].microseconds == pytest.approx(20.0)
    assert rows[1].gigabytes_per_second == pytest.approx(16 * 128 * 2 / 20e-6 / 1e9)
    assert len(measuring.table(rows)) == 2 + len(rows)


def test_a_contender_that_is_wrong_or_fails_is_told_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("no such kernel")

    def wrong(_fmt: object, w: torch.Tensor, x: torch.Tensor) -> object:
        return lambda _: x @ (w.T * 1.5).to(x.dtype), 1, w

    monkeypatch.setattr(measuring, "_contenders", lambda _: {"broken": broken, "wrong": wrong})
    rows = measuring.measure(formats.get("q8_0"), (4, 32), 2, device="cpu", rounds=1, clock=measuring.wall_clock)
    assert "no such kernel" in str(rows[0].problem) and rows[0].microseconds is None
    assert rows[1].problem == "its product is off by 50%"
