"""The folder for transformers and vLLM: its tensors read back by compressed-tensors, its logits computed by transformers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, Lfm2Config, LlamaConfig, MixtralConfig

from fewbits import activations, artifact, embedded, formats, model, pipeline, planning, progress, runtimes, targets
from fewbits.activations import Activation
from fewbits.artifact import Artifact
from fewbits.drafting import Draft
from fewbits.errors import InputError
from fewbits.model import Weight
from fewbits.planning import Plan
from fewbits.runtimes.torch import of_module
from fewbits.targets.compressed_tensors import PLAN, TARGET, reading, schemes, shards

compressed_tensors = pytest.importorskip("compressed_tensors")
safetensors = pytest.importorskip("safetensors")

SMALL: dict[str, Any] = {
    "vocab_size": 160, "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
TOKENS = [1, 2, 3, 4, 5, 99, 100]
WIDE = Weight("any", (256, 256), "mlp", "fp32")
ACCEPTED = [fmt for fmt in formats.all().values() if fmt.levels and TARGET.accepts(WIDE, fmt) is None]


@dataclass(frozen=True)
class Written:
    source: model.Model
    artifact: Artifact
    path: Path

    @property
    def quantized(self) -> list[Weight]:
        return [w for w in self.artifact.weights if formats.get(self.artifact.plan[w.name].format).levels]

    @property
    def config(self) -> Any:
        return json.loads((self.path / "config.json").read_text())["quantization_config"]

    def tensors(self) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        return {name: tensor for file in sorted(self.path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def source_of(config: Any, folder: Path) -> model.Model:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)  # zero as made: a lost bias would not show
    made.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded.MODEL / name, folder / name)
    return model.open(folder)


def write(source: model.Model, plan: Plan, folder: Path) -> Written:
    made = artifact.quantize(source, plan, folder / "artifact", progress.silent)
    TARGET.write(made, folder / "model.ct", progress.silent)
    return Written(source, made, folder / "model.ct")


def uniform(source: model.Model, fmt: str, overrides: tuple[str, ...] = (), activation: Activation | None = None) -> Plan:
    return planning.uniform(source.weights, TARGET, formats.get(fmt), overrides, activation=activation)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> model.Model:
    """Untied; 24 rows of keys and values fill no whole words of zero points, 40 columns no whole words of 3, 5 and 6 bits."""
    config = LlamaConfig(**SMALL, hidden_size=40, intermediate_size=96, head_dim=12, num_hidden_layers=2, tie_word_embeddings=False)
    return source_of(config, tmp_path_factory.mktemp("llama"))


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
    plan = planning.read(json.dumps({"schema": 1, "target": "safetensors", "weights": rows}), source.weights)
    return write(source, plan, folder)


def test_every_format_is_there_and_some_are_not(every_format: Written) -> None:
    assert {entry.format for entry in every_format.artifact.plan.entries} >= {fmt.name for fmt in ACCEPTED}
    assert {"int2_g32", "int3_g32_asym", "int8_channel", "fp8_e4m3_tensor", "q4_0", "q8_0", "tq2_0", "mxfp4", "nvfp4"} <= {
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


def assert_as_good_as_float32(got: Tensor, written: Written) -> None:
    """No further from float64 than another order of summation explains: 8 times what torch's own float32 is off."""
    module = written.artifact.module()
    single = of_module(module).logits(TOKENS)
    module.set_experts_implementation("eager")  # the fused products of experts know no float64
    with torch.inference_mode():
        exact = module.double()(torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert (got - exact).abs().max() <= 8 * (single - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()


def test_types_read_back_are_those_of_the_plan(every_format: Written) -> None:
    found = reading.types(every_format.path)
    for weight in every_format.artifact.weights:
        assert found[weight.name] == TARGET.written_as(weight, formats.get(every_format.artifact.plan[weight.name].format))
    assert TARGET.written_as(WIDE, formats.get("q4_0")) == "int4_g32"
    assert TARGET.written_as(WIDE, formats.get("int3_tensor")) == "int3_channel"


def test_values_read_with_safetensors_alone_are_those_of_the_artifact(every_format: Written) -> None:
    stored = {each.name.removesuffix(".weight"): each for each in reading.contents(every_format.path)}
    for weight in every_format.artifact.weights:
        assert torch.equal(stored[weight.name].load().float(), every_format.artifact.decoded(weight)), weight.name
        assert stored[weight.name].shape == weight.shape


def test_the_bytes_of_every_weight_are_those_of_the_plan(every_format: Written) -> None:
    stored = {each.name.removesuffix(".weight"): each for each in reading.contents(every_format.path)}
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
    "experts": (
        MixtralConfig(**SMALL, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_local_experts=2),
        "experts",
        "experts",
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
    found = reading.types(written.path)
    assert all(found[each.parameter.removesuffix(".weight")] == written.artifact.plan[each.name].format for each in written.source.weights
               if each not in written.quantized)  # fmt: skip


REFUSED = {"q4_k": "minimum", "q4_1": "minimum", "q6_k": "scales of scales", "q3_s6": "scales of scales", "iq4_nl": "consecutive",
           "iq4_xs": "consecutive", "fp8_e5m2_channel": "e4m3", "nvfp4_tensor": "bfloat16"}  # fmt: skip


@pytest.mark.parametrize(("name", "word"), REFUSED.items())
def test_formats_whose_values_would_change_are_refused_with_a_reason(name: str, word: str) -> None:
    assert word in (TARGET.accepts(WIDE, formats.get(name)) or "")


@pytest.mark.parametrize(
    ("fmt", "activation", "word"),
    [
        ("int8_g32", "int8", "int8_channel"),
        ("int8_channel_asym", "int8", "int8_channel"),
        ("int4_channel", "int8:static", "int8_channel"),
        ("int8_channel", "fp8", "fp8_e4m3_channel"),
        ("mxfp4", "fp8", "fp8_e4m3_channel"),
        ("fp8_e4m3_channel", "fp8_e5m2", "e4m3 only"),
    ],
)
def test_rounded_inputs_that_no_kernel_takes_are_refused(fmt: str, activation: str, word: str) -> None:
    parsed = activations.parse(activation)
    assert parsed and word in (TARGET.accepts_activation(WIDE, formats.get(fmt), parsed) or "")


def test_a_rounded_cache_is_refused_and_a_float_one_is_not() -> None:
    assert "scale" in (TARGET.accepts_kv("fp8") or "") and "scale" in (TARGET.accepts_kv("int4") or "")
    assert TARGET.accepts_kv("float") is None


@pytest.mark.parametrize("architecture", ["T5ForConditionalGeneration", "BertForMaskedLM"])
def test_models_that_cannot_be_verified_are_refused_before_any_work(architecture: str) -> None:
    import transformers

    config = getattr(transformers, architecture.partition("For")[0] + "Config")(architectures=[architecture])
    assert TARGET.supports(config, None)
    assert TARGET.supports(LlamaConfig(), None) is None


def test_formats_are_recognised_by_their_values_not_their_names() -> None:
    other = replace(formats.get("int4_g32"), name="other")
    assert TARGET.accepts(WIDE, other) is None and TARGET.written_as(WIDE, other) == "int4_g32"
    assert TARGET.nbytes(WIDE, other) == TARGET.nbytes(WIDE, formats.get("q4_0")) == 256 * (128 + 2 * 8)


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


def test_many_files_hold_what_one_does(llama: model.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write(llama, uniform(llama, "int4_channel_asym"), tmp_path / "one")
    monkeypatch.setattr(shards, "SHARD_BYTES", 10_000)
    TARGET.write(one.artifact, tmp_path / "many.ct", progress.silent)
    many = Written(llama, one.artifact, tmp_path / "many.ct")
    assert len(list(many.path.glob("*.safetensors"))) > 2
    before, after = one.tensors(), many.tensors()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    open_ = runtimes.get("transformers").open
    torch.testing.assert_close(open_(many.path, 128).logits(TOKENS), open_(one.path, 128).logits(TOKENS), rtol=0, atol=0)


def test_tensors_lie_aligned_and_without_gaps_in_the_file(llama: model.Model, tmp_path: Path) -> None:
    written = write(llama, uniform(llama, "int3_channel"), tmp_path)
    content = (written.path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    about = header.pop("__metadata__")
    assert about["fewbits.source_sha256"] == written.artifact.provenance.sha256 and about["format"] == "pt"
    end = 0
    for name, row in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        assert row["data_offsets"][0] == end, name
        assert (8 + length + end) % {"I64": 8, "I32": 4, "F32": 4, "F16": 2}[row["dtype"]] == 0, name
        end = row["data_offsets"][1]
    assert 8 + length + end == len(content)


def test_writing_twice_gives_the_same_bytes_and_no_path_of_this_machine(every_format: Written, tmp_path: Path) -> None:
    TARGET.write(every_format.artifact, tmp_path / "again.ct", progress.silent)
    names = sorted(file.name for file in every_format.path.iterdir())
    assert names == sorted(file.name for file in (tmp_path / "again.ct").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", PLAN} <= set(names)
    for name in names:
        content = (every_format.path / name).read_bytes()
        assert content == (tmp_path / "again.ct" / name).read_bytes(), name
        assert str(every_format.path.parent).encode() not in content and str(Path.home()).encode() not in content


def test_an_unquantized_plan_is_a_plain_checkpoint(llama: model.Model, tmp_path: Path) -> None:
    written = write(llama, planning.kept(llama.weights, TARGET), tmp_path)
    assert "quantization_config" not in json.loads((written.path / "config.json").read_text())
    assert model.open(written.path).weights == llama.weights
    assert not reading.is_compressed(written.path)


def edited(written: Written, folder: Path, change: Callable[[Any], None]) -> Path:
    shutil.copytree(written.path, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def four_bits(llama: model.Model, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(llama, uniform(llama, "int4_channel"), tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [("num_bits", 3, "weight_packed"), ("symmetric", False, "weight_zero_point` is missing"), ("type", None, "does not say")],
)
def test_a_config_that_contradicts_the_tensors_is_refused(four_bits: Written, tmp_path: Path, key: str, value: object, word: str) -> None:
    def change(config: Any) -> None:
        weights = config["config_groups"]["group_0"]["weights"]
        weights.update({key: value}) if value is not None else weights.pop(key)

    with pytest.raises(InputError) as caught:
        reading.types(edited(four_bits, tmp_path / "edited", change))
    assert word in str(caught.value) and caught.value.hint


def test_a_layer_that_no_group_names_is_refused(four_bits: Written, tmp_path: Path) -> None:
    folder = edited(four_bits, tmp_path / "edited", lambda config: config["config_groups"]["group_0"]["targets"].pop())
    with pytest.raises(InputError, match="no group"):
        reading.types(folder)
    with pytest.raises(InputError, match="lm_head"):
        runtimes.get("transformers").open(folder, 16)


def test_groups_by_pattern_and_by_class_are_read_too(four_bits: Written, tmp_path: Path) -> None:
    expected = reading.types(four_bits.path)
    for i, targets_ in enumerate((["Linear"], ["re:.*proj$", "lm_head"])):
        folder = edited(four_bits, tmp_path / str(i), lambda c, t=targets_: c["config_groups"]["group_0"].update(targets=t))  # type: ignore[misc]
        assert reading.types(folder) == expected


def test_only_a_folder_that_fewbits_wrote_is_replaced(four_bits: Written, tmp_path: Path) -> None:
    out = tmp_path / "out.ct"
    assert pipeline.export(four_bits.artifact, out) == pipeline.export(four_bits.artifact, out) == out
    (out / PLAN).unlink()
    with pytest.raises(InputError, match="did not make"):
        pipeline.export(four_bits.artifact, out)


def test_pricing_loads_neither_torch_nor_compressed_tensors() -> None:
    code = (
        "import sys; from fewbits import formats, targets; from fewbits.model import Weight\n"
        "w = Weight('a', (64, 172), 'mlp', 'fp16'); t = targets.get('safetensors')\n"
        "[t.nbytes(w, f) for f in formats.all().values() if not (f.fits(w.shape) or t.accepts(w, f))]\n"
        "print([m for m in ('torch', 'compressed_tensors', 'transformers', 'safetensors') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


Run = Callable[..., tuple[int, str, str]]


def test_the_command_line_quantizes_verifies_and_exports(run: Run, tmp_path: Path) -> None:
    common = ["--to", "safetensors", "--tokens", 512, "--json"]
    code, said, _ = run("quantize", embedded.MODEL, "-o", tmp_path, "--format", "int4_g64", "--method", "rtn", *common)
    result = json.loads(said)
    assert code == 0 and Path(result["file"]) == tmp_path / "model.ct"
    verdict = result["verdict"]
    assert verdict["runtime"] == "transformers" and "compressed-tensors" in verdict["runtime_version"]
    assert verdict["kl_floor"] < 1e-9 < verdict["kl_mean"] < 0.1  # float32 in both; a wrong layout is off by nats
    assert verdict["bytes"] == sum(file.stat().st_size for file in (tmp_path / "model.ct").iterdir())
    assert abs(verdict["bits_per_weight"] - result["plan"]["bits_per_weight"]) < 0.01
    code, said, _ = run("verify", tmp_path / "model.ct", "--against", embedded.MODEL, "--tokens", 512, "--json")
    assert code == 0 and json.loads(said)["kl_mean"] == verdict["kl_mean"]
    code, _, _ = run("export", result["artifact"], "--to", "safetensors", "-o", tmp_path / "again.ct", "--quiet")
    assert code == 0 and (tmp_path / "again.ct/model.safetensors").read_bytes() == (tmp_path / "model.ct/model.safetensors").read_bytes()
    assert targets.get("safetensors").runtime == runtimes.for_file(tmp_path / "again.ct").name
