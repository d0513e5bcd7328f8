"""The folder for onnxruntime-genai: read back by the `onnx` package, run by onnxruntime-genai, both compared with transformers."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from greedy import by_genai, recomputed
from mixtures import with_tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fewbits import artifact, embedded, formats, model, planning, progress, targets
from fewbits.artifact import Artifact
from fewbits.artifact.draft import Draft
from fewbits.errors import InputError
from fewbits.model.weights import Weight
from fewbits.targets import export
from fewbits.targets.onnx import contents as written
from fewbits.targets.onnx_genai import TARGET, OnnxGenai, contents, families
from fewbits.verification import crosscheck, runtimes, session
from fewbits.verification.runtimes.torch import of_module

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
onnx = pytest.importorskip("onnx")
genai = pytest.importorskip("onnxruntime_genai")

SMALL: dict[str, Any] = {
    "vocab_size": 160, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
SCALED: dict[str, Any] = {"rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {**SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {**SCALED, "rope_type": "yarn"}
LINEAR = {"rope_theta": 100.0, "rope_type": "linear", "factor": 3.0}
CONFIGS: dict[str, Any] = {
    "llama, tied": hf.LlamaConfig(**SMALL, **TIED),
    "llama, biases, llama3 rope": hf.LlamaConfig(**SMALL, **UNTIED, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3),
    "mistral, window, wide heads": hf.MistralConfig(**SMALL, **UNTIED, sliding_window=8, head_dim=32),
    "qwen2, tied, linear rope": hf.Qwen2Config(**SMALL, **TIED, rope_parameters=LINEAR),
    "qwen3, untied, yarn": hf.Qwen3Config(**SMALL, **UNTIED, head_dim=16, rope_parameters=YARN),
    "qwen3, one windowed layer": hf.Qwen3Config(
        **SMALL, **TIED, head_dim=16, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "phi3, fused projections": hf.Phi3Config(**SMALL, **UNTIED, sliding_window=16),
    "smollm3, a layer without rope": hf.SmolLM3Config(**SMALL, **TIED, no_rope_layers=[1, 0]),
    "gemma": hf.GemmaConfig(**SMALL, head_dim=16),
    "gemma2, caps": hf.Gemma2Config(**SMALL, head_dim=32, sliding_window=8, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3, two ropes": hf.Gemma3TextConfig(
        **SMALL, head_dim=16, sliding_window=8, query_pre_attn_scalar=40, layer_types=["sliding_attention", "full_attention"]
    ),
}
MIXED = ("mlp=int8_g32", "layers.1.self_attn=fp16", "0.self_attn.(q|qkv)_proj=int4_g32_asym")  # the rest: int4_g32


@dataclass(frozen=True)
class Written:
    source: model.Model
    artifact: Artifact
    path: Path

    @property
    def config(self) -> Any:
        return self.artifact.config

    def session(self) -> session.Session:
        return runtimes.get("onnxruntime-genai").open(self.path, 64)

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        return torch.randint(3, self.config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def make(config: Any, folder: Path) -> model.Model:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config)
    for name, parameter in made.named_parameters():
        if name.endswith("bias") or "norm" in name:
            nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.2)  # 0 or 1 as made: a lost one would not show
    made.save_pretrained(folder)
    return model.open(with_tokenizer(folder))


def write(source: model.Model, target: OnnxGenai, fmt: str, overrides: tuple[str, ...], folder: Path) -> Written:
    plan = planning.uniform(source.weights, target, formats.get(fmt), overrides)
    made = artifact.quantize(source, plan, folder / "artifact", progress.silent)
    target.write(made, folder / "model.genai", progress.silent)
    return Written(source, made, folder / "model.genai")


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda name: name.replace(", ", "-").replace(" ", "_"))
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Four formats; activations in float (level 0), so that what differs is the graph."""
    folder = tmp_path_factory.mktemp("mixed")
    return write(make(CONFIGS[request.param], folder / "source"), OnnxGenai(accuracy_level=0), "int4_g32", MIXED, folder)


@pytest.fixture(scope="module")
def kept(embedded_model: model.Model, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(embedded_model, TARGET, "fp16", (), tmp_path_factory.mktemp("kept"))


@pytest.fixture(scope="module")
def int4(embedded_model: model.Model, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(embedded_model, TARGET, "int4_g32", (), tmp_path_factory.mktemp("int4"))


def single_and_double(written: Written, tokens: list[int]) -> tuple[Tensor, Tensor]:
    module = written.artifact.module()
    single = of_module(module).logits(tokens)
    with torch.inference_mode():
        exact: Tensor = module.double()(torch.tensor([tokens]), use_cache=False).logits[0]
    return single, exact


def assert_as_good_as_float32(got: Tensor, single: Tensor, exact: Tensor) -> None:
    """No further from float64 than another order of summation explains: 8 times what torch's own float32 is off."""
    assert got.shape == exact.shape and got.dtype == torch.float32
    assert (got - exact).abs().max() <= 8 * (single - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()


@pytest.mark.parametrize("count", [1, 40])
def test_logits_are_those_of_the_decoded_weights(mixed: Written, count: int) -> None:
    tokens = mixed.tokens(count)
    assert_as_good_as_float32(mixed.session().logits(tokens), *single_and_double(mixed, tokens))


def test_steps_with_the_cache_give_what_the_prompt_gives_at_once(mixed: Written) -> None:
    tokens = mixed.tokens(24)
    loaded = genai.Model(str(mixed.path))
    parameters = genai.GeneratorParams(loaded)
    parameters.set_search_options(max_length=24)
    generator = genai.Generator(loaded, parameters)
    steps = []
    for piece in (tokens[:5], tokens[5:12], *([token] for token in tokens[12:])):
        generator.append_tokens(np.array([piece], np.int32))
        steps.append(torch.from_numpy(generator.get_output("logits")[0].copy()))
    assert_as_good_as_float32(torch.cat(steps), *single_and_double(mixed, tokens))


def test_sequences_of_a_batch_do_not_see_each_other(mixed: Written) -> None:
    batch = [mixed.tokens(9, seed) for seed in (1, 2)]
    loaded = genai.Model(str(mixed.path))
    parameters = genai.GeneratorParams(loaded)
    parameters.set_search_options(max_length=9, batch_size=2)
    generator = genai.Generator(loaded, parameters)
    generator.append_tokens(np.array(batch, np.int32))
    for got, tokens in zip(generator.get_output("logits").copy(), batch, strict=True):
        assert_as_good_as_float32(torch.from_numpy(got), *single_and_double(mixed, tokens))


def test_types_in_the_file_are_those_of_the_plan(mixed: Written) -> None:
    plan = mixed.artifact.plan
    assert TARGET.written(mixed.path) == {entry.weight: entry.format for entry in plan.entries}
    assert {entry.format for entry in plan.entries} == {"int4_g32", "int4_g32_asym", "int8_g32", "fp16"}
    for entry in plan.entries:
        assert written.written_as(formats.get(entry.format), entry.shape[1]) == entry.format


def test_types_of_other_layouts_are_named_by_their_values() -> None:
    named = {name: written.written_as(formats.get(name), 256) for name in ("q4_0", "q8_0", "int8_channel", "bf16")}
    assert named == {"q4_0": "int4_g32", "q8_0": "int8_g32", "int8_channel": "int8_g256", "bf16": "bf16"}


def test_values_in_the_file_are_exactly_the_decoded_weights(mixed: Written) -> None:
    stored = {i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(mixed.path / "model.onnx").graph.initializer}
    for weight in mixed.artifact.weights:
        np.testing.assert_array_equal(decoded_by_hand(stored, weight, mixed), mixed.artifact.decoded(weight).numpy())


def decoded_by_hand(stored: dict[str, Any], weight: Weight, written: Written) -> Any:
    if f"{weight.name}.values" in stored:
        return stored[f"{weight.name}.values"].astype(np.float32)
    codes, scales = stored[f"{weight.name}.codes"], stored[f"{weight.name}.scales"]
    bits = int(math.log2(len(formats.get(written.artifact.plan[weight.name].format).levels or ())))
    numbers = unpacked(codes, bits).reshape(*scales.shape, -1)
    zeros: Any = 2.0 ** (bits - 1)
    if f"{weight.name}.zeros" in stored:
        zeros = unpacked(stored[f"{weight.name}.zeros"], bits)[:, : scales.shape[1], None]
    return ((numbers - zeros) * scales[..., None]).reshape(weight.shape[0], -1)[:, : weight.shape[1]]


def unpacked(codes: Any, bits: int) -> Any:
    numbers = np.stack([codes & 15, codes >> 4], -1) if bits == 4 else codes[..., None]
    return numbers.reshape(len(codes), -1).astype(np.float32)


def test_an_inspection_lists_every_array_with_its_values(mixed: Written) -> None:
    kind, metadata, found = contents.contents(mixed.path)
    stored = {i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(mixed.path / "model.onnx").graph.initializer}
    assert (kind, metadata["fewbits.source"]) == ("onnxruntime-genai", "source")
    assert {tensor.name for tensor in found} >= set(mixed.artifact.rest)
    for tensor in found:
        assert (tensor.shape, tensor.nbytes) == (stored[tensor.name].shape, stored[tensor.name].nbytes)
        assert (tensor.load is None) == (tensor.type == "uint8")
        if tensor.load:
            np.testing.assert_array_equal(tensor.load().numpy(), stored[tensor.name])


def test_size_is_known_to_the_byte_before_anything_is_written(mixed: Written) -> None:
    plan, target = mixed.artifact.plan, OnnxGenai(accuracy_level=0)
    promised = target.overhead(Draft(mixed.source, plan)) + plan.nbytes
    assert promised == sum(file.stat().st_size for file in mixed.path.iterdir())
    assert contents.weight_bytes(mixed.path) == plan.nbytes
    graph = onnx.load(mixed.path / "model.onnx", load_external_data=False).graph
    lengths = {tensor.name: int({e.key: e.value for e in tensor.external_data}.get("length", 0)) for tensor in graph.initializer}
    for entry in plan.entries:
        parts = (f"{entry.weight}.{part}" for part in ("codes", "scales", "zeros", "values"))
        assert sum(lengths.get(part, 0) for part in parts) == entry.nbytes, entry.weight


def test_no_array_is_in_the_file_twice_and_none_in_the_graph(mixed: Written) -> None:
    proto = onnx.load(mixed.path / "model.onnx", load_external_data=False)
    inside = [tensor for tensor in proto.graph.initializer if not tensor.external_data]
    assert all(math.prod(tensor.dims) <= 4 for tensor in inside)  # shapes and single numbers
    parts = {f"{w.name}.{part}" for w in mixed.artifact.weights for part in ("codes", "scales", "zeros", "values")}
    outside = {tensor.name for tensor in proto.graph.initializer if tensor.external_data} - parts
    assert {name for name in outside if not name.startswith("rotary.")} == set(mixed.artifact.rest)
    assert len(proto.graph.initializer) == len({tensor.name for tensor in proto.graph.initializer})


def test_writing_twice_gives_the_same_bytes_and_names_no_path(mixed: Written, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    OnnxGenai(accuracy_level=0).write(mixed.artifact, tmp_path / "again", progress.silent)
    assert capfd.readouterr() == ("", "")
    names = sorted(file.name for file in mixed.path.iterdir())
    assert names == ["genai_config.json", "model.onnx", "model.onnx.data", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        content = (mixed.path / name).read_bytes()
        assert (tmp_path / "again" / name).read_bytes() == content
        assert not any(str(place).encode() in content for place in (Path.home(), Path.cwd(), mixed.path.parent))


PROMPTS = ("The function returns", "import os", "A list of", "Raises an exception if", "class Node:")


def test_greedy_generation_of_the_float_model_is_torchs(kept: Written) -> None:
    session, floats = kept.session(), of_module(kept.artifact.module())
    for prompt in PROMPTS:
        tokens = kept.source.tokenizer(prompt)["input_ids"]
        assert by_genai(session, tokens, 24) == recomputed(floats, tokens, 24)


def test_logits_of_the_float_model_are_torchs(kept: Written) -> None:
    tokens = kept.source.tokenizer(" ".join(PROMPTS))["input_ids"]
    assert_as_good_as_float32(kept.session().logits(tokens), *single_and_double(kept, tokens))


def test_generation_goes_on_beyond_the_end_of_a_text(kept: Written, tmp_path: Path) -> None:
    tokens = kept.source.tokenizer(PROMPTS[0])["input_ids"]
    usual = by_genai(kept.session(), tokens, 12)
    shutil.copytree(kept.path, tmp_path / "ends")
    about = json.loads((tmp_path / "ends" / "genai_config.json").read_text())
    about["model"]["eos_token_id"] = usual[4]  # genai itself stops here
    (tmp_path / "ends" / "genai_config.json").write_text(json.dumps(about))
    assert by_genai(runtimes.get("onnxruntime-genai").open(tmp_path / "ends", 64), tokens, 12) == usual


def test_genai_alone_tokenizes_and_generates_from_the_folder(kept: Written) -> None:
    loaded = genai.Model(str(kept.path))
    tokenizer, parameters = genai.Tokenizer(loaded), genai.GeneratorParams(loaded)
    tokenizer.update_options(add_special_tokens=True)  # else the caller puts the first token there
    theirs = tokenizer.encode(PROMPTS[0]).tolist()
    assert theirs == kept.source.tokenizer(PROMPTS[0])["input_ids"]
    parameters.set_search_options(max_length=len(theirs) + 8)
    generator = genai.Generator(loaded, parameters)
    generator.append_tokens(np.array([theirs], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    assert generator.get_sequence(0)[len(theirs) :].tolist() == by_genai(kept.session(), theirs, 8)


def test_level_4_is_off_by_what_int8_inputs_explain(int4: Written, kept: Written) -> None:
    text = (embedded.MODEL.parent / "text" / "verification.txt").read_text()[:3000]
    tokens = int4.source.tokenizer(text)["input_ids"]
    windows = [tokens[start : start + 64] for start in range(0, 512, 64)]
    floor = crosscheck.crosscheck(kept.artifact, TARGET, kept.session(), windows, 0.0).kl
    found = crosscheck.crosscheck(int4.artifact, TARGET, int4.session(), windows, floor)
    assert found.agrees and found.explained > 100 * floor


def test_the_file_says_its_accuracy_level_and_where_it_came_from(int4: Written) -> None:
    proto = onnx.load(int4.path / "model.onnx", load_external_data=False)
    props = {p.key: p.value for p in proto.metadata_props}
    about = int4.artifact.provenance
    assert (props["fewbits.source_sha256"], props["fewbits.accuracy_level"]) == (about.sha256, "4")
    assert {a.i for node in proto.graph.node for a in node.attribute if a.name == "accuracy_level"} == {4}


def test_generation_config_knows_better_than_config(tmp_path: Path) -> None:
    source = make(CONFIGS["llama, tied"], tmp_path / "source")
    said = {"eos_token_id": [7, 9], "do_sample": True, "top_p": 0.9, "temperature": None}
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps(said))
    about = json.loads((write(source, TARGET, "fp16", (), tmp_path).path / "genai_config.json").read_text())
    assert (about["model"]["eos_token_id"], about["model"]["bos_token_id"], about["model"]["pad_token_id"]) == ([7, 9], 0, 2)
    chosen = {name: about["search"][name] for name in ("do_sample", "top_p", "temperature", "max_length", "past_present_share_buffer")}
    assert chosen == {"do_sample": True, "top_p": 0.9, "temperature": 1.0, "max_length": 64, "past_present_share_buffer": True}


ODD = SMALL | {"hidden_size": 40, "num_attention_heads": 4}
REFUSED: dict[str, tuple[Any, str]] = {
    "no such graph": (hf.GPT2Config(), "gpt2"),
    "heads of 10": (hf.LlamaConfig(**ODD), "10 wide"),
    "activation": (hf.LlamaConfig(**SMALL, hidden_act="relu"), "relu"),
    "rope that grows": (hf.LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "dynamic"),
    "exact gelu": (hf.Gemma2Config(**SMALL, hidden_activation="gelu"), "its activation is gelu"),
    "part of a head": (hf.Phi3Config(**SMALL, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}), "part of each head"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_written_are_refused_before_any_work(name: str) -> None:
    config, word = REFUSED[name]
    assert word in (TARGET.supports(config, None) or "")


def test_supported_models_are_not_refused() -> None:
    assert {families.unsupported(config) for config in CONFIGS.values()} == {None}


def test_what_the_runtime_cannot_do_is_refused_with_a_reason(embedded_model: model.Model) -> None:
    with pytest.raises(InputError, match="fixed beforehand"):
        planning.uniform(embedded_model.weights, TARGET, formats.get("int4_g32"), kv="int8")
    assert planning.uniform(embedded_model.weights, TARGET, formats.get("int4_g32"), kv="float").kv == "float"
    assert "minimum" in (TARGET.accepts(embedded_model.weights[1], formats.get("q4_k")) or "")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no graph": lambda folder: (folder / "model.onnx").unlink(),
    "no data": lambda folder: (folder / "model.onnx.data").unlink(),
    "cut data": lambda folder: (folder / "model.onnx.data").write_bytes((folder / "model.onnx.data").read_bytes()[:-4096]),
    "no json": lambda folder: (folder / "genai_config.json").write_text("{"),
    "empty json": lambda folder: (folder / "genai_config.json").write_text("{}"),
    "odd graph": lambda folder: (folder / "model.onnx").write_bytes(b"not a model\n" * 40),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_an_input_error_with_a_hint(int4: Written, tmp_path: Path, damage: str) -> None:
    shutil.copytree(int4.path, tmp_path / "broken")
    DAMAGES[damage](tmp_path / "broken")
    with pytest.raises(InputError) as caught:
        runtimes.get("onnxruntime-genai").open(tmp_path / "broken", 16)
    assert caught.value.hint


def test_running_a_model_reports_to_nobody(int4: Written, tmp_path: Path) -> None:
    """Both packages keep what they report in the user's cache until it is sent; without reports they make no file there."""
    opened = f"runtimes.get('onnxruntime-genai').open(Path({str(int4.path)!r}), 16)"
    code = f"from fewbits.verification import runtimes; from pathlib import Path; {opened}"
    hidden = {"ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS", "CI", "XDG_CACHE_HOME"}
    fresh = {name: value for name, value in os.environ.items() if name not in hidden} | {"HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=fresh, check=True)
    assert not list(tmp_path.rglob("*onnxruntime*"))


def test_sequences_that_do_not_fit_are_refused(kept: Written) -> None:
    session = kept.session()
    for tokens, word in (([], "no tokens"), ([1] * 65, "65 tokens"), ([2048], "vocabulary")):
        with pytest.raises(InputError, match=word):
            session.logits(tokens)


def test_the_runtime_is_chosen_by_the_folder(kept: Written) -> None:
    runtime = runtimes.for_file(kept.path)
    assert (runtime.name, runtimes.for_file(kept.artifact.path).name) == ("onnxruntime-genai", "torch")
    assert runtime.missing() is None and runtime.version().startswith("onnxruntime-genai 0.")
    assert targets.get("onnx-genai").runtime == runtime.name


def test_an_artifact_is_exported_by_name(int4: Written, tmp_path: Path) -> None:
    path = export.export(int4.artifact, tmp_path / "out", to="onnx-genai")
    assert path == tmp_path / "out" / "model.genai"
    assert (path / "model.onnx.data").read_bytes() == (int4.path / "model.onnx.data").read_bytes()
    assert export.export(int4.artifact, path) == path  # a folder that fewbits made is replaced
