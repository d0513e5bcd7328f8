"""vLLM joins q, k and v and reads one factor of nvfp4 for the three."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from fewbits import formats, kernels
from fewbits.methods import rtn
from fewbits.targets.compressed_tensors import TARGET
from fewbits.targets.compressed_tensors.joined_layers import joined_with, under_one_factor

FMT = formats.get("nvfp4_tensor")


def _weight(name: str, expert: int | None = None) -> Any:
    return SimpleNamespace(name=name, expert=expert)


def test_usual_weights_share_a_power_of_two() -> None:
    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    assert {float(FMT.fit(w * size)["factor"]) for size in (0.003, 0.02, 0.1, 0.3)} == {2.0**-10}
    for size in (1e-6, 30.0, 1e20):
        mantissa, _ = torch.frexp(FMT.fit(w * size)["factor"])
        assert float(mantissa) == 0.5


def test_scales_follow_the_largest_factor_with_the_values_kept() -> None:
    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)) * 0.1
    parts, shape = rtn.quantize(w, FMT), (16, 64)
    other = under_one_factor(FMT, parts, parts["factor"] * 256)
    assert torch.equal(other["factor"], parts["factor"] * 256) and not torch.equal(other["blocks"], parts["blocks"])
    assert torch.equal(kernels.decode(FMT, other, shape), kernels.decode(FMT, parts, shape))
    assert under_one_factor(FMT, parts, parts["factor"]) is parts


def test_a_block_too_small_for_the_larger_factor_gets_the_nearest_scale() -> None:
    w = torch.randn(1, 64, generator=torch.Generator().manual_seed(2)) * 0.1
    w[:, :16] *= 0.02
    parts = rtn.quantize(w, FMT)
    before = kernels.decode(FMT, parts, (1, 64))
    after = kernels.decode(FMT, under_one_factor(FMT, parts, parts["factor"] * 256), (1, 64))
    assert torch.equal(after[:, 16:], before[:, 16:]) and not torch.equal(after[:, :16], before[:, :16])
    step = 2.0**-9 * float(parts["factor"]) * 256  # of the smallest scales; the largest code is 6
    assert (after[:, :16] - before[:, :16]).abs().max() <= 6 * step / 2


def test_layers_that_are_multiplied_together_are_found() -> None:
    names = [
        f"model.layers.{i}.{part}_proj" for i in (0, 1) for part in ("self_attn.q", "self_attn.k", "self_attn.o", "mlp.up", "mlp.gate")
    ]
    weights = [_weight(name) for name in names]

    def beside(name: str) -> list[str]:
        return [each.name for each in joined_with(cast("Any", _weight(name)), weights, TARGET.together)]

    assert beside("model.layers.1.self_attn.k_proj") == [f"model.layers.1.self_attn.{part}_proj" for part in "qk"]
    assert beside("model.layers.0.mlp.gate_proj") == ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj"]
    assert beside("model.layers.0.self_attn.o_proj") == ["model.layers.0.self_attn.o_proj"]
