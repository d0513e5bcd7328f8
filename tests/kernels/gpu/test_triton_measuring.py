# ruff: noqa: N803  (gemlite's own names)
"""The benchmark that times products on a GPU: on the CPU, with a clock of its own, as far as that goes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types

import pytest
import torch
from typer.testing import CliRunner

from fewbits import cli, formats
from fewbits.benchmarks.gpu import products
from fewbits.kernels import triton as gpu


def test_contenders_are_checked_and_timed_in_turn() -> None:
    order: list[int] = []

    def clock(run: object, calls: int) -> float:
        order.append(id(run))
        return 1e-6 * calls

    rows = products.measure(formats.get("int4_g64"), (16, 128), 1, device="cpu", rounds=3, clock=clock)
    assert [row.name for row in rows][:2] == ["fewbits triton", "torch"] and all(row.problem is None for row in rows[:2])
    assert order[:2] * 3 == order[:6] and rows[0].microseconds == pytest.approx(20.0)
    assert rows[1].gigabytes_per_second == pytest.approx(16 * 128 * 2 / 20e-6 / 1e9)
    assert len(products.table(rows)) == 2 + len(rows)


def test_a_contender_that_is_wrong_or_fails_is_told_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("no such kernel")

    def wrong(_fmt: object, w: torch.Tensor, x: torch.Tensor) -> object:
        return lambda _: x @ (w.T * 1.5).to(x.dtype), 1, w

    monkeypatch.setattr(products, "_contenders", lambda _: {"broken": broken, "wrong": wrong})
    rows = products.measure(formats.get("q8_0"), (4, 32), 2, device="cpu", rounds=1, clock=products.wall_clock)
    assert "no such kernel" in str(rows[0].problem) and rows[0].microseconds is None
    assert rows[1].problem == "its product is off by 50%"


def peers() -> dict[str, types.ModuleType]:
    """As much of torchao and gemlite as is called, under the names and in the order of arguments that they have."""

    class Int4WeightOnlyConfig:
        def __init__(self, group_size: int) -> None:
            self.group_size = group_size

    def quantize_(layer: torch.nn.Linear, config: Int4WeightOnlyConfig) -> None:
        w = layer.weight.data.unflatten(1, (-1, config.group_size)).float()
        scale = w.abs().amax(2, keepdim=True) / 7
        layer.weight.data = ((w / scale).round() * scale).flatten(1).to(layer.weight.dtype)

    class GemLiteLinear:
        def __init__(self, W_nbits: int, group_size: int, in_features: int, out_features: int, input_dtype: str, output_dtype: str) -> None:
            self.bits, self.group, self.shape = W_nbits, group_size, (out_features, in_features)
            assert input_dtype == output_dtype == "fp16"

        def pack(self, W_q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bias: torch.Tensor | None) -> None:
            assert W_q.dtype == torch.uint8 and W_q.shape == self.shape and int(W_q.max()) < 1 << self.bits and bias is None
            spread = [each.float().repeat_interleave(self.group, 1) for each in (scales, zeros)]
            self.weight = (W_q.float() - spread[1]) * spread[0]

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight.to(x.dtype))

    torchao, gemlite = types.ModuleType("torchao.quantization"), types.ModuleType("gemlite")
    torchao.Int4WeightOnlyConfig, torchao.quantize_ = Int4WeightOnlyConfig, quantize_
    gemlite.GemLiteLinear, gemlite.DType = GemLiteLinear, types.SimpleNamespace(FP16="fp16", BF16="bf16")
    return {"torchao.quantization": torchao, "gemlite": gemlite}


@pytest.mark.parametrize("name", ["int4_g64", "int4_g64_asym"])
def test_other_libraries_take_part_where_they_are_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins: neither library was at hand. Each is checked against the weight that it multiplies by itself."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: object() if module in ("torchao", "gemlite") else found(module))
    for module, own in peers().items():
        monkeypatch.setitem(sys.modules, module, own)
    rows = products.measure(formats.get(name), (16, 128), 2, device="cpu", rounds=1, clock=lambda *_: 1e-6)
    assert [row.name for row in rows] == ["fewbits triton", "torch", "torchao", "gemlite"]
    assert [row.problem for row in rows] == [None] * 4
    assert [row.name for row in products.measure(formats.get("q4_k"), (4, 256), 1, "cpu", rounds=1, clock=lambda *_: 1e-6)] == [
        "fewbits triton", "torch",
    ]  # fmt: skip


WORDS = ["bench", "kernels", "--backend", "triton", "--format", "q4_k,q8_0", "--shape", "256x8", "--rows", "1", "--rows", "3"]


def test_the_command_times_every_case_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "runs_here", lambda: None)
    asked = []

    def measure(fmt: object, shape: object, tokens: int) -> list[products.Measured]:
        asked.append((fmt.name, shape, tokens))  # type: ignore[attr-defined]
        return [products.Measured("fewbits triton", 12.5, 700.0, 0.75), products.Measured("gemlite", None, None, None, "no such kernel")]

    monkeypatch.setattr(products, "measure", measure)
    shown = CliRunner().invoke(cli.app, WORDS)
    assert shown.exit_code == 0 and asked == [(name, (8, 256), tokens) for name in ("q4_k", "q8_0") for tokens in (1, 3)]
    assert "q8_0, 256 x 8, 3 tokens" in shown.output and "| fewbits triton | 12.5 | 700 | 75% |" in shown.output
    assert "no such kernel" in shown.output
    listed = json.loads(CliRunner().invoke(cli.app, [*WORDS, "--json"]).output)
    assert len(listed) == 4 and listed[1]["tokens"] == 3 and listed[1]["results"][0]["share_of_roofline"] == 0.75


def test_the_command_shows_the_roofline_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "runs_here", lambda: "torch sees no GPU")
    shown = CliRunner().invoke(cli.app, WORDS)
    assert shown.exit_code == 3 and "| A100 80GB SXM | q4_k |" in shown.output and "torch sees no GPU" in shown.output + shown.stderr
