"""Rounded inputs in a folder for transformers and vLLM: what config.json says of them, and what transformers computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_models import TOKENS, WIDE, Written, small_llama, source_of, uniform, write
from torch import Tensor
from transformers import LlamaConfig

from fewbits import formats, model, planning
from fewbits.artifact.draft import Draft
from fewbits.formats.runtime import activations
from fewbits.formats.runtime.activations import Activation
from fewbits.targets.compressed_tensors import TARGET, shards
from fewbits.verification import runtimes
from fewbits.verification.runtimes.torch import of_module

compressed_tensors = pytest.importorskip("compressed_tensors")
safetensors = pytest.importorskip("safetensors")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> model.Model:
    return small_llama(tmp_path_factory.mktemp("llama"))


def as_transformers_rounds(x: Tensor, activation: Activation) -> Tensor:
    """compressed-tensors' rule in plain words: all 256 codes, and a token's largest value in the middle of the last two steps."""
    if activation.format != "int8":
        return activations.quantized(x, activation)
    scale = torch.tensor(activation.scale) if activation.static else x.abs().amax(-1, keepdim=True) / 127.5
    return ((x / scale + activation.zero).clamp(-128, 127).round() - activation.zero) * scale


ROUNDED = {
    "int8, per token": ("int8_channel", activations.parse("int8")),
    "int8, per token, one scale": ("int8_tensor", activations.parse("int8")),
    "int8, static": ("int8_channel", activations.parse("int8:static")),
    "int8, static, with zero": ("int8_channel", Activation("int8", static=True, range="mse", symmetric=False)),
    "fp8, per token": ("fp8_e4m3_channel", activations.parse("fp8")),
    "fp8, static, one scale": ("fp8_e4m3_tensor", activations.parse("fp8:static")),
}


def rounded(source: model.Model, name: str, folder: Path) -> Written:
    fmt, activation = ROUNDED[name]
    plan = uniform(source, fmt, activation=activation)
    if activation and activation.static:  # a range that clips some inputs, so that what happens there is seen too
        plan = planning.with_activations(plan, {weight: each.calibrated(-2.0, 1.5) for weight, each in plan.activations.items()})
    return write(source, plan, folder)


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_inputs_are_computed_as_the_plan_says(llama: model.Model, tmp_path: Path, name: str) -> None:
    written = rounded(llama, name, tmp_path)
    plan, module = written.artifact.plan, written.artifact.module()
    exact = of_module(module).logits(TOKENS)
    for layer, activation in plan.activations.items():
        module.get_submodule(layer).register_forward_pre_hook(
            lambda _, x, activation=activation: (as_transformers_rounds(x[0], activation),)
        )
    imitated = of_module(module).logits(TOKENS)
    got = runtimes.get("transformers").open(written.path, 128).logits(TOKENS)
    assert not torch.allclose(imitated, exact, rtol=1e-3)  # rounding shows at all
    torch.testing.assert_close(got, imitated, rtol=0, atol=0)  # same weights, same functions of torch: same bits
    assert len(plan.activations) == 14


@pytest.mark.parametrize("name", [name for name in ROUNDED if "fp8" in name or "zero" in name])
def test_where_the_rules_are_the_same_so_are_the_logits_of_our_torch_runtime(llama: model.Model, tmp_path: Path, name: str) -> None:
    written = rounded(llama, name, tmp_path)
    ours = runtimes.get("torch").open(written.artifact.path, 128).logits(TOKENS)
    torch.testing.assert_close(runtimes.get("transformers").open(written.path, 128).logits(TOKENS), ours, rtol=0, atol=0)


def test_four_bits_on_both_sides_are_computed_as_compressed_tensors_does(tmp_path: Path) -> None:
    """W4A4 in nvfp4: scales of 16 values at run time, under a factor that is stored."""
    wide = LlamaConfig(
        vocab_size=160, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    source = source_of(wide, tmp_path / "source")
    plan = uniform(source, "nvfp4_tensor", activation=activations.parse("nvfp4"))
    plan = planning.with_activations(plan, {weight: each.calibrated(-6.0, 5.0) for weight, each in plan.activations.items()})
    written = write(source, plan, tmp_path)
    ours = runtimes.get("torch").open(written.artifact.path, 128).logits(TOKENS)
    got = runtimes.get("transformers").open(written.path, 128).logits(TOKENS)
    exact = of_module(written.artifact.module()).logits(TOKENS)
    assert (got - exact).norm() > 0.01 * exact.norm()  # rounding shows at all
    # the same rule; compressed-tensors divides once more than we do, so that last bits may differ (1.2e-6 here)
    assert (got - ours).norm() < 1e-4 * (got - exact).norm()
    assert {"input_global_scale", "weight_global_scale"} <= {name.rpartition(".")[2] for name in written.tensors()}
    (group, *_) = written.config["config_groups"].values()
    assert group["input_activations"]["dynamic"] == "local" and group["input_activations"]["num_bits"] == 4


def test_what_is_said_of_inputs_is_valid_and_scales_are_stored(llama: model.Model, tmp_path: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    written = rounded(llama, "int8, static, with zero", tmp_path)
    group, output = QuantizationConfig.model_validate(written.config).config_groups.values()
    assert (output.targets, output.format, output.input_activations) == (["lm_head"], "pack-quantized", None)
    assert (group.format, group.weights.strategy, group.weights.num_bits) == ("int-quantized", "channel", 8)
    assert (group.input_activations.strategy, group.input_activations.dynamic, group.input_activations.symmetric) == (
        "tensor",
        False,
        False,
    )
    tensors, activation = written.tensors(), written.artifact.plan.activations["model.layers.1.mlp.up_proj"]
    assert tensors["model.layers.1.mlp.up_proj.input_scale"].tolist() == [activation.scale]
    assert tensors["model.layers.1.mlp.up_proj.input_zero_point"].tolist() == [activation.zero] and activation.zero
    assert tensors["model.layers.1.mlp.up_proj.weight"].dtype == torch.int8


@pytest.mark.parametrize(
    ("fmt", "activation", "word"),
    [
        ("int8_g32", "int8", "int8_channel"),
        ("int8_channel_asym", "int8", "int8_channel"),
        ("int4_channel", "int8:static", "int8_channel"),
        ("int8_channel", "fp8", "fp8_e4m3_channel"),
        ("mxfp4", "fp8", "fp8_e4m3_channel"),
        ("fp8_e4m3_channel", "fp8_e5m2", "e4m3 only"),
        ("fp8_e4m3_channel", "nvfp4", "nvfp4_tensor"),
        ("nvfp4_tensor", "fp8", "fp8_e4m3_channel"),
    ],
)
def test_rounded_inputs_that_no_kernel_takes_are_refused(fmt: str, activation: str, word: str) -> None:
    parsed = activations.parse(activation)
    assert parsed and word in (TARGET.accepts_activation(WIDE, formats.get(fmt), parsed) or "")


@pytest.mark.parametrize("limit", [shards.SHARD_BYTES, 20_000])
@pytest.mark.parametrize("name", ["int8, static, with zero", "int8, per token"])
def test_the_size_is_known_to_the_byte_before_anything_is_quantized(
    llama: model.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", limit)
    written = rounded(llama, name, tmp_path)
    plan = written.artifact.plan
    size = sum(file.stat().st_size for file in written.path.iterdir())
    assert size == plan.nbytes + TARGET.overhead(Draft(llama, plan))
    assert len(list(written.path.glob("*.safetensors"))) == (1 if limit > 20_000 else 3)
