"""Mixtures of experts for transformers and vLLM: every expert is layers of its own, under the names in which the model is published."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_models import SMALL, TOKENS, Written, assert_as_good_as_float32, source_of, uniform, write
from transformers import (
    FalconConfig,
    GPT2Config,
    GptOssConfig,
    GraniteMoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    NemotronHConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
)
from zoo.models import build

from fewbits import formats, model
from fewbits.artifact.draft import Draft
from fewbits.errors import InputError
from fewbits.model.weights import TOWER, Weight
from fewbits.targets import WrongFileError
from fewbits.targets.compressed_tensors import TARGET, contents
from fewbits.targets.compressed_tensors.layout import layout_of, pattern_of
from fewbits.verification import runtimes
from fewbits.verification.runtimes.torch import of_module

pytest.importorskip("compressed_tensors")

SIZES: dict[str, Any] = {**SMALL, "hidden_size": 64, "num_hidden_layers": 2, "num_experts_per_tok": 2}
MIXTURES: dict[str, Any] = {
    "mixtral": MixtralConfig(**SIZES, intermediate_size=96, num_local_experts=4),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=64),
    "nemotron_h": NemotronHConfig(
        **SIZES, layers_block_type=["attention", "moe"], head_dim=16, n_routed_experts=4, moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32, n_group=1, topk_group=1, mamba_num_heads=8, mamba_head_dim=16,
    ),
    "llama4_text": Llama4TextConfig(
        **{**SIZES, "num_experts_per_tok": 1}, head_dim=16, intermediate_size=32, intermediate_size_mlp=96, num_local_experts=4,
        interleave_moe_layer_step=1, pad_token_id=0,
    ),
}  # fmt: skip
PUBLISHED = {
    "mixtral": ["model.layers.1.block_sparse_moe.experts.3.w1", "model.layers.1.block_sparse_moe.experts.3.w2"],
    "qwen2_moe": ["model.layers.0.mlp.experts.0.up_proj", "model.layers.0.mlp.experts.0.down_proj"],
    "nemotron_h": ["backbone.layers.1.mixer.experts.2.up_proj", "backbone.layers.1.mixer.experts.2.down_proj"],
    "llama4_text": ["model.layers.0.feed_forward.experts.1.gate_proj", "model.layers.0.feed_forward.experts.1.up_proj"],
}
HALF = 2.0**-11  # transformers decodes an expert in the type of its scales: the product is rounded to float16


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Written]:
    folder = tmp_path_factory.mktemp(request.param)
    source = source_of(MIXTURES[request.param], folder / "source")
    return request.param, write(source, uniform(source, "int4_g32"), folder)


def session_of(written: Written) -> Any:
    return runtimes.get("transformers").open(written.path, 128)


def test_every_expert_is_quantized_and_has_layers_of_its_own(mixture: tuple[str, Written]) -> None:
    name, written = mixture
    experts = [weight for weight in written.artifact.weights if weight.expert is not None]
    assert experts and all(written.artifact.plan[weight.name].format == "int4_g32" for weight in experts)
    types = contents.types(written.path)
    assert all(types[layer] == "int4_g32" for layer in PUBLISHED[name])
    assert not any(weight.parameter in types for weight in experts)
    TARGET.check(written.artifact.plan, written.artifact.weights, written.path)


def test_compressed_tensors_decodes_every_expert_to_exactly_ours(mixture: tuple[str, Written]) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_name

    written = mixture[1]
    config, tensors, layout = QuantizationConfig.model_validate(written.config), written.tensors(), layout_of(written.source.config)
    for weight in written.artifact.weights:
        if weight.expert is None:
            continue
        decoded = []
        for place in layout.places(weight):
            (scheme,) = (s for s in config.config_groups.values() if any(match_name(place.layer, target) for target in s.targets))
            own = {part: tensors[f"{place.layer}.{part}"] for part in ("weight_packed", "weight_scale", "weight_shape")}
            own["weight_scale"] = own["weight_scale"].float()
            decoded.append(BaseCompressor.get_value_from_registry(scheme.format).decompress(own, scheme)["weight"])
        assert torch.equal(torch.cat(decoded), written.artifact.decoded(weight)), weight.name


def test_transformers_puts_every_expert_where_it_belongs(mixture: tuple[str, Written]) -> None:
    """By its own loader: nothing of fewbits has a hand in it."""
    name, written = mixture
    assert runtimes.get("transformers").remark(written.path) == ""
    session = session_of(written)
    loaded = dict(session._module.named_parameters())
    if name == "llama4_text":  # its names are not checked by parameters below
        assert_as_good_as_float32(session.logits(TOKENS), written)
    for weight in written.artifact.weights:
        wanted = written.artifact.decoded(weight)
        if name == "llama4_text" and weight.expert is not None:  # it makes a list of layers of it
            layers = [f"{place.layer}.weight" for place in layout_of(written.source.config).places(weight)]
            assert torch.equal(torch.cat([loaded[layer] for layer in layers]), wanted)
        elif weight.expert is not None:
            assert ((weight.view(loaded[weight.parameter]) - wanted).abs() <= HALF * wanted.abs()).all(), weight.name
        elif not weight.tied_to:
            assert torch.equal(weight.view(loaded[weight.parameter]), wanted), weight.name


def test_its_size_is_known_to_the_byte_before_anything_is_quantized(mixture: tuple[str, Written]) -> None:
    written = mixture[1]
    size = sum(file.stat().st_size for file in written.path.iterdir())
    assert TARGET.overhead(Draft(written.source, written.artifact.plan)) + written.artifact.plan.nbytes == size


def test_what_chooses_among_experts_stays_in_float(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_key_value_heads": 4}
    source = source_of(PhimoeConfig(**sizes, intermediate_size=96, num_local_experts=4, pad_token_id=0), tmp_path / "source")
    routers = [weight for weight in source.weights if weight.name.endswith(".router")]
    assert len(routers) == 2 and all("float" in (TARGET.accepts(weight, formats.get("int4_g32")) or "") for weight in routers)
    session_of(write(source, uniform(source, "int4_g32"), tmp_path))


def test_one_layer_of_experts_has_one_format(tmp_path: Path) -> None:
    source = source_of(MIXTURES["mixtral"], tmp_path / "source")
    with pytest.raises(InputError, match=r"experts of a layer need one format.*down_proj"):
        uniform(source, "int4_g32", ("experts.down_proj=int8_channel",))
    groups = {pattern: {match.groups() for w in source.weights if (match := re.search(pattern, w.name))} for pattern in TARGET.together}
    assert groups[TARGET.together[-1]] == {("",)}  # a budget gives all experts of a model one format


def test_layers_in_several_formats_are_decoded_apart_and_the_verdict_says_so(tmp_path: Path) -> None:
    source = source_of(MIXTURES["mixtral"], tmp_path / "source")
    written = write(source, uniform(source, "int4_g32", ("layers.0.*experts=int8_channel",)), tmp_path)
    TARGET.check(written.artifact.plan, written.artifact.weights, written.path)
    remark = runtimes.get("transformers").remark(written.path)
    assert "int4_g32 and int8_channel" in remark and "compressed-tensors" in remark
    assert_as_good_as_float32(session_of(written).logits(TOKENS), written)


UNLOADED = {
    "experts without a rule": (GraniteMoeConfig(**SIZES, intermediate_size=96, num_local_experts=4), "no rule"),
    "a layer that the model initializes": (
        FalconConfig(vocab_size=160, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, initializer_range=0.3, bos_token_id=0),
        "FalconLinear",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLOADED)
def test_what_transformers_cannot_load_is_decoded_layer_by_layer_and_the_verdict_says_so(name: str, tmp_path: Path) -> None:
    config, word = UNLOADED[name]
    written = write(source := source_of(config, tmp_path / "source"), uniform(source, "int4_g32"), tmp_path)
    assert written.quantized
    assert word in runtimes.get("transformers").remark(written.path)
    assert_as_good_as_float32(session_of(written).logits(TOKENS), written)


def test_a_file_that_lacks_an_expert_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = source_of(UNLOADED["experts without a rule"][0], tmp_path / "source")
    written = write(source, uniform(source, "int4_g32"), tmp_path)
    whole = written.tensors()
    lost = {name: tensor for name, tensor in whole.items() if ".1.block_sparse_moe.experts.2." not in name}
    assert len(lost) == len(whole) - 9
    save_file(lost, written.path / "model.safetensors")
    with pytest.raises(InputError, match=r"experts[.]2[.]gate_proj"):
        session_of(written)
    with pytest.raises(WrongFileError, match=r"experts[.]2[.]gate_proj"):
        TARGET.check(written.artifact.plan, written.artifact.weights, written.path)
    save_file(whole | {"model.more.weight": torch.zeros(3)}, written.path / "model.safetensors")
    with pytest.raises(InputError, match=r"model[.]more"):
        session_of(written)


EXPERT = Weight("model.layers.0.mlp.experts.down_proj.0", (64, 256), "mlp", "fp32", expert=0)


@pytest.mark.parametrize(
    ("fmt", "word"),
    [("int4_g32_asym", "zero point"), ("int3_g32", "4 and 8 bits"), ("fp8_e4m3_channel", "float8"), ("nvfp4", "4 and 8 bits")],
)
def test_formats_that_one_of_the_two_cannot_take_for_experts_are_refused(fmt: str, word: str) -> None:
    assert word in (TARGET.accepts(EXPERT, formats.get(fmt)) or "")
    assert TARGET.accepts(replace(EXPERT, name="model.layers.0.mlp.down_proj", expert=None), formats.get(fmt)) is None


@pytest.mark.parametrize("fmt", ["int4_g32", "int4_g128", "int8_channel", "q8_0", "mxfp4"])
def test_formats_that_both_take_are_accepted_for_experts(fmt: str) -> None:
    assert TARGET.accepts(EXPERT, formats.get(fmt)) is None


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (GPT2Config(n_layer=1, architectures=["GPT2LMHeadModel"]), "100 %.*Conv1D"),
        (
            GptOssConfig(**SIZES, intermediate_size=64, num_local_experts=4, head_dim=16, architectures=["GptOssForCausalLM"]),
            "GptOssExperts",
        ),
    ],
)
def test_a_model_that_would_mostly_stay_in_float_is_refused_before_any_work(config: Any, word: str) -> None:
    assert re.search(word, TARGET.supports(config, None) or "")
    assert TARGET.supports(LlamaConfig(num_hidden_layers=1, architectures=["LlamaForCausalLM"]), None) is None


def test_a_pattern_names_the_experts_of_its_layer_under_any_prefix() -> None:
    pattern = pattern_of("model.layers.1.mlp.experts.5.up_proj").removeprefix("re:")
    assert re.match(pattern, "model.layers.1.mlp.experts.77.down_proj") and re.match(
        pattern, "language_model.model.layers.1.mlp.experts.0.w1"
    )
    assert not re.match(pattern, "model.layers.11.mlp.experts.5.up_proj")
    assert not re.match(pattern, "model.layers.1.mlp.shared_experts.up_proj") and "experts" in pattern


def test_the_language_part_of_a_model_that_reads_pictures_is_quantized_and_its_tower_ignored(tmp_path: Path) -> None:
    source = model.open(build("gemma3", tmp_path / "source"))
    assert TARGET.supports(source.config, None) is None
    written = write(source, uniform(source, "int4_g32"), tmp_path)
    towers = [weight for weight in source.weights if weight.kind == TOWER]
    assert towers and not set(towers) & set(written.quantized)
    assert {weight.name for weight in towers} <= set(written.config["ignore"])
    # in the names of the checkpoint, and of transformers' modules
    wanted = {"language_model.model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"}
    assert wanted <= {target for group in written.config["config_groups"].values() for target in group["targets"]}
    TARGET.check(written.artifact.plan, written.artifact.weights, written.path)
    got, same = session_of(written).logits(TOKENS), of_module(written.artifact.module()).logits(TOKENS)
    assert torch.equal(got, same)
