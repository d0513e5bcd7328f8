"""The folder for transformers and vLLM: its tensors read back by compressed-tensors, its logits computed by transformers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_models import SMALL, TOKENS, WIDE, Written, assert_as_good_as_float32, small_llama, source_of, uniform, write
from transformers import GPT2Config, Lfm2Config, LlamaConfig

from fewbits import formats, model, planning, progress
from fewbits.errors import InputError
from fewbits.targets.compressed_tensors import PLAN, TARGET, contents, schemes
from fewbits.verification import runtimes

compressed_tensors = pytest.importorskip("compressed_tensors")
safetensors = pytest.importorskip("safetensors")

ACCEPTED = [fmt for fmt in formats.all().values() if fmt.levels and TARGET.accepts(WIDE, fmt) is None]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> model.Model:
    return small_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def every_format(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """One model in which every layer has a format of its own: all that the registry has and the target accepts."""
    folder = tmp_path_factory.mktemp("every")
    layers = -(-len(ACCEPTED) // 7)
    config = LlamaConfig(**SMALL, hidden_size=256, intermediate_size=256, num_hidden_layers=layers, tie_word_embeddings=False)
    source = source_of(config, folder / "source")
    linear = [weight.name for weight in source.weights if ".layers." in weight.name]
    chosen = dict(zip(linear, ACCEPTED, strict=False))
    rows = {name: {"format": chosen[name].name if name in chosen else "keep"} for name in (weight.name for weight in source.weights)}
    plan = planning.read(json.dumps({"schema": 1, "target": "safetensors", "weights": rows}), source.weights, TARGET)
    return write(source, plan, folder)


def test_every_format_is_there_and_some_are_not(every_format: Written) -> None:
    assert {entry.format for entry in every_format.artifact.plan.entries} >= {fmt.name for fmt in ACCEPTED}
    assert {"int2_g32", "int3_g32_asym", "int8_channel", "fp8_e4m3_tensor", "q4_0", "q8_0", "tq2_0", "mxfp4", "nvfp4", "nvfp4_tensor"} <= {
        fmt.name for fmt in ACCEPTED
    }


def test_compressed_tensors_decodes_every_weight_to_exactly_ours(every_format: Written) -> None:
    """By its own compressors, called on the tensors of the file: neither transformers nor fewbits has a hand in it."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config, tensors = QuantizationConfig.model_validate(every_format.config), every_format.tensors()
    scheme_of = {target: scheme for scheme in config.config_groups.values() for target in scheme.targets}
    assert set(scheme_of) == {weight.name for weight in every_format.quantized}
    for weight in every_format.quantized:
        scheme = scheme_of[weight.name]
        own = {name.removeprefix(f"{weight.name}."): t for name, t in tensors.items() if name.startswith(f"{weight.name}.")}
        if scheme.weights.num_bits > 4 or scheme.weights.type == "int":
            own["weight_scale"] = own["weight_scale"].float()  # as a model in float32 loads it
        decoded = BaseCompressor.get_value_from_registry(scheme.format).decompress(own, scheme)["weight"]
        assert torch.equal(decoded.float(), every_format.artifact.decoded(weight)), every_format.artifact.plan[weight.name].format


def test_transformers_loads_every_format_and_gives_the_logits_of_the_decoded_weights(every_format: Written) -> None:
    session: Any = runtimes.get("transformers").open(every_format.path, 128)
    modules = dict(session._module.named_modules())
    for weight in every_format.artifact.weights:
        assert torch.equal(modules[weight.name].weight, every_format.artifact.decoded(weight)), weight.name
    assert_as_good_as_float32(session.logits(TOKENS), every_format)


def test_types_read_back_are_those_of_the_plan(every_format: Written) -> None:
    found = contents.types(every_format.path)
    for weight in every_format.artifact.weights:
        assert found[weight.name] == TARGET.written_as(weight, formats.get(every_format.artifact.plan[weight.name].format))
    assert TARGET.written_as(WIDE, formats.get("q4_0")) == "int4_g32"
    assert TARGET.written_as(WIDE, formats.get("int3_tensor")) == "int3_channel"


def test_values_read_with_safetensors_alone_are_those_of_the_artifact(every_format: Written) -> None:
    stored = {each.name.removesuffix(".weight"): each for each in contents.contents(every_format.path)}
    for weight in every_format.artifact.weights:
        assert torch.equal(stored[weight.name].load().float(), every_format.artifact.decoded(weight)), weight.name
        assert stored[weight.name].shape == weight.shape


def test_the_bytes_of_every_weight_are_those_of_the_plan(every_format: Written) -> None:
    stored = {each.name.removesuffix(".weight"): each for each in contents.contents(every_format.path)}
    for weight in every_format.artifact.weights:
        entry = every_format.artifact.plan[weight.name]
        packed = f"{weight.name}.weight_shape" in every_format.tensors()
        assert stored[weight.name].nbytes == entry.nbytes + 16 * packed, entry.format


@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_are_packed_as_the_installed_compressed_tensors_packs_them(bits: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    half = 1 << (bits - 1)
    codes = torch.randint(0, 2 * half, (5, 83), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    signed = (codes.short() - half).to(torch.int8)
    assert torch.equal(schemes._packed(codes, bits), pack_to_int32(signed, bits))
    assert torch.equal(schemes._packed(codes.T, bits).T, pack_to_int32(signed, bits, packed_dim=0))


MIXES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "one layout": ("int4_channel", ("k_proj=int8_channel", "v_proj=int3_channel_asym"), "pack-quantized"),
    "four formats": ("int4_channel", ("down_proj=fp8_e4m3_channel", "k_proj=int6_channel", "lm_head=bf16"), "mixed-precision"),
    "floats alone": ("fp8_e4m3_tensor", ("o_proj=keep",), "float-quantized"),
}


@pytest.mark.parametrize("name", MIXES)
def test_a_mixed_plan_is_loaded_with_each_layer_as_planned(llama: model.Model, tmp_path: Path, name: str) -> None:
    fmt, overrides, layout = MIXES[name]
    written = write(llama, uniform(llama, fmt, overrides), tmp_path)
    assert written.config["format"] == layout
    session: Any = runtimes.get("transformers").open(written.path, 128)
    modules = dict(session._module.named_modules())
    for weight in written.artifact.weights:
        assert torch.equal(modules[weight.name].weight, written.artifact.decoded(weight)), weight.name
    assert_as_good_as_float32(session.logits(TOKENS), written)
    named = {target for group in written.config["config_groups"].values() for target in group["targets"]}
    layers = {weight.name for weight in written.artifact.weights if weight.kind != "embedding"}
    assert named | set(written.config["ignore"]) == layers and not named & set(written.config["ignore"])  # vLLM looks every layer up


KEPT: dict[str, tuple[Any, str, str]] = {
    "tied": (
        LlamaConfig(**SMALL, hidden_size=64, intermediate_size=96, num_hidden_layers=1, tie_word_embeddings=True),
        "embed",
        "embedding",
    ),
    "Conv1D": (
        GPT2Config(vocab_size=160, n_layer=1, n_embd=64, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0, initializer_range=0.3),
        "c_attn",
        "Conv1D",
    ),
    "convolution": (
        Lfm2Config(**SMALL, hidden_size=64, intermediate_size=96, num_hidden_layers=2, layer_types=["conv", "full_attention"]),
        "conv.conv",
        "convolution",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_cannot_be_quantized_is_kept_with_its_reason_and_loads(name: str, tmp_path: Path) -> None:
    config, weight, word = KEPT[name]
    source = source_of(config, tmp_path / "source")
    written = write(source, uniform(source, "int8_channel"), tmp_path)
    kept = [entry for entry in written.artifact.plan.entries if weight in entry.weight]
    assert kept and all(formats.get(entry.format).levels is None and entry.fallback and word in entry.reason for entry in kept)
    assert_as_good_as_float32(runtimes.get("transformers").open(written.path, 128).logits(TOKENS), written)
    rows = {weight.name: {"format": "int8_channel" if weight.name == kept[0].weight else "keep"} for weight in source.weights}
    with pytest.raises(InputError, match=word):  # a plan that says otherwise is refused when it is read
        planning.read(json.dumps({"schema": 1, "target": "safetensors", "weights": rows}), source.weights, TARGET)
    found = contents.types(written.path)
    assert all(found[each.parameter.removesuffix(".weight")] == written.artifact.plan[each.name].format for each in written.source.weights
               if each not in written.quantized)  # fmt: skip


REFUSED = {"q4_k": "minimum", "q4_1": "minimum", "q6_k": "scales of scales", "q3_s6": "scales of scales", "iq4_nl": "consecutive",
           "iq4_xs": "consecutive", "fp8_e5m2_channel": "e4m3"}  # fmt: skip


@pytest.mark.parametrize(("name", "word"), REFUSED.items())
def test_formats_whose_values_would_change_are_refused_with_a_reason(name: str, word: str) -> None:
    assert word in (TARGET.accepts(WIDE, formats.get(name)) or "")


def test_a_rounded_cache_is_refused_and_a_float_one_is_not() -> None:
    assert "scale" in (TARGET.accepts_kv("fp8") or "") and "scale" in (TARGET.accepts_kv("int4") or "")
    assert TARGET.accepts_kv("float") is None


@pytest.mark.parametrize("architecture", ["T5ForConditionalGeneration", "BertForMaskedLM"])
def test_models_that_cannot_be_verified_are_refused_before_any_work(architecture: str) -> None:
    import transformers

    config = getattr(transformers, architecture.partition("For")[0] + "Config")(architectures=[architecture])
    assert TARGET.supports(config, None)
    assert TARGET.supports(LlamaConfig(), None) is None


def test_what_vllm_makes_one_layer_of_is_planned_together(llama: model.Model) -> None:
    groups: dict[object, list[str]] = {}
    for weight in llama.weights:
        found = [match for pattern in TARGET.together if (match := re.search(pattern, weight.name))]
        assert len(found) <= 1
        for match in found:
            groups.setdefault((match.re, match.groups()), []).append(weight.name.rpartition(".")[2])
    assert sorted(groups.values()) == 2 * [["gate_proj", "up_proj"]] + 2 * [["q_proj", "k_proj", "v_proj"]]


def test_formats_are_recognised_by_their_values_not_their_names() -> None:
    other = replace(formats.get("int4_g32"), name="other")
    assert TARGET.accepts(WIDE, other) is None and TARGET.written_as(WIDE, other) == "int4_g32"
    assert TARGET.nbytes(WIDE, other) == TARGET.nbytes(WIDE, formats.get("q4_0")) == 256 * (128 + 2 * 8)


def test_writing_twice_gives_the_same_bytes_and_no_path_of_this_machine(every_format: Written, tmp_path: Path) -> None:
    TARGET.write(every_format.artifact, tmp_path / "again.ct", progress.silent)
    names = sorted(file.name for file in every_format.path.iterdir())
    assert names == sorted(file.name for file in (tmp_path / "again.ct").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", PLAN} <= set(names)
    for name in names:
        content = (every_format.path / name).read_bytes()
        assert content == (tmp_path / "again.ct" / name).read_bytes(), name
        assert str(every_format.path.parent).encode() not in content and str(Path.home()).encode() not in content


def test_pricing_loads_neither_torch_nor_compressed_tensors() -> None:
    code = (
        "import sys; from fewbits import formats, targets; from fewbits.model import Weight\n"
        "w = Weight('a', (64, 172), 'mlp', 'fp16'); t = targets.get('safetensors')\n"
        "[t.nbytes(w, f) for f in formats.all().values() if not (f.fits(w.shape) or t.accepts(w, f))]\n"
        "print([m for m in ('torch', 'compressed_tensors', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
