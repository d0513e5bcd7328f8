"""The roofline model against arithmetic by hand, and what supports() refuses."""

from __future__ import annotations

import math

import pytest

from fewbits import formats
from fewbits.benchmarks.gpu import compiled
from fewbits.kernels import triton as gpu
from fewbits.kernels.triton import tile_shapes
from fewbits.kernels.triton.tooling import gpus, roofline
from fewbits.kernels.triton.tooling.gpus import GPU

ROUND = GPU("round numbers", "sm_80", 100, bandwidth=1000, half=100, int8=200, float8=None)


def test_one_token_takes_as_long_as_reading_the_weight() -> None:
    found = roofline.expected(ROUND, "q8_0", (4096, 4096), 1)
    assert found.bytes == 4096 * 4096 * 34 // 32 + 2 * (4096 + 4096)
    assert found.bound == "memory" and found.microseconds == pytest.approx(found.bytes / 1e6)
    assert found.against_half == pytest.approx((2 * 4096 * 4096 + 16384) / found.bytes)


def test_many_tokens_take_as_long_as_multiplying() -> None:
    found = roofline.expected(ROUND, "int4_g128", (4096, 4096), 4096)
    assert found.bound == "compute" and found.microseconds == pytest.approx(2 * 4096**3 / 100e6)
    assert found.against_half == pytest.approx(1.0)


def test_the_crossover_is_the_first_batch_that_compute_bounds() -> None:
    first = roofline.crossover(ROUND, "int4_g128", (4096, 4096))
    assert roofline.expected(ROUND, "int4_g128", (4096, 4096), first).bound == "compute"
    assert roofline.expected(ROUND, "int4_g128", (4096, 4096), first - 1).bound == "memory"
    # by hand: 100 operations take as long as a byte; 2 per weight and token, against 4.125 bits per weight and 16,384 bytes of x and out
    # per token
    weights = 4096 * 4096
    assert first == math.ceil(weights * 4.125 / 8 / (2 * weights / 100 - 16384))


def test_splits_cost_the_sums_that_they_write_and_read() -> None:
    one, two = (roofline.expected(ROUND, "q4_k", (1024, 4096), 8, splits) for splits in (1, 2))
    assert two.bytes - one.bytes == 2 * 4 * 2 * 8 * 1024


def test_every_architecture_has_a_gpu_and_every_gpu_an_architecture() -> None:
    assert {each.architecture for each in gpus.ALL} == set(tile_shapes.ARCHITECTURES)
    assert len({each.name for each in gpus.ALL}) == len(gpus.ALL)


def test_a_gpu_is_known_by_what_its_driver_calls_it() -> None:
    told = {
        "NVIDIA A100-SXM4-80GB": "A100 80GB SXM", "NVIDIA GeForce RTX 4090": "RTX 4090", "NVIDIA L4": "L4", "NVIDIA L40S": "L40S",
        "NVIDIA H100 80GB HBM3": "H100 SXM", "AMD Instinct MI300X": "MI300X", "AMD Radeon RX 7900 XTX": "RX 7900 XTX",
    }  # fmt: skip
    assert {name: getattr(gpus.named(name), "name", None) for name in told} == told
    assert gpus.named("NVIDIA T4") is None


def test_the_tables_have_a_line_for_each() -> None:
    lines = compiled.roofline_table(["q4_k"], (4096, 4096), (1, 64))
    assert len(lines) == 2 + len(gpus.ALL) and all(line.count("|") == 6 for line in lines)


def test_what_the_kernels_do_not_take_is_said() -> None:
    assert gpu.supports(formats.get("q4_k"), (4096, 4096)) is None
    assert "256" in str(gpu.supports(formats.get("q4_k"), (4096, 100)))
    assert "float32" in str(gpu.supports(formats.get("q4_k"), (4096, 4096), "float32"))
    assert "more scales" in str(gpu.supports(formats.get("q4_k"), (2**20, 2**16)))
    assert "is a cast" in str(gpu.supports(formats.get("bf16"), (4096, 4096)))
    assert "older than sm_80" in str(gpu.unsupported_architecture("cuda", "sm_75"))
    assert gpu.unsupported_architecture("hip", "gfx942") is None and "gfx803" in str(gpu.unsupported_architecture("hip", "gfx803"))


def test_without_a_gpu_none_run_here() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "no GPU" in str(gpu.runs_here())
