"""The .onnx file: read back by the `onnx` package, run by ONNX Runtime, both compared with what the artifact decodes to."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from enumerated import one_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, Qwen2Config

from fewbits import artifact, formats, model, planning, progress, targets
from fewbits.artifact import Artifact
from fewbits.errors import InputError
from fewbits.model.weights import Weight
from fewbits.planning import Plan
from fewbits.targets.onnx import ACCURACY_LEVEL, Onnx
from fewbits.verification import runtimes, session
from fewbits.verification.runtimes.torch import of_module

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

SMALL: dict[str, Any] = {"vocab_size": 160, "num_hidden_layers": 1, "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 0}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
LLAMA = LlamaConfig(**SMALL, **HEADS, hidden_size=64, intermediate_size=96, tie_word_embeddings=True)
QWEN = Qwen2Config(**SMALL, **HEADS, hidden_size=64, intermediate_size=172, tie_word_embeddings=False)
GPT2 = GPT2Config(vocab_size=160, n_layer=1, n_embd=64, n_head=4, n_positions=128, initializer_range=0.3, bos_token_id=0, eos_token_id=0)
NARROW = LlamaConfig(**SMALL, **HEADS, hidden_size=40, intermediate_size=64, tie_word_embeddings=True, head_dim=10)
GEMMA = Gemma3TextConfig(**SMALL, **HEADS, hidden_size=64, intermediate_size=96, head_dim=16, sliding_window=8, tie_word_embeddings=True)

CASES: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "llama, tied, grouped heads": (LLAMA, "int4_g32", ("down_proj=q4_0",)),
    "qwen2, biases, 172 columns": (QWEN, "int4_g32", ("lm_head=bf16", "k_proj=fp16", "embed=fp16")),
    "gpt2, Conv1D, learned positions": (GPT2, "q8_0", ("c_attn=int4_g32", "c_fc=fp16")),
    "llama, tied, 40 columns padded": (NARROW, "int8_channel", ("self_attn=fp32",)),
    "gemma3, scaled embedding, window": (GEMMA, "int8_channel", ()),
}


@dataclass(frozen=True)
class Written:
    artifact: Artifact
    path: Path
    proto: Any
    initializers: dict[str, Any]

    @property
    def plan(self) -> Plan:
        return self.artifact.plan

    def node(self, initializer: str, op: str) -> Any:
        """The one node of this type that reads an initializer, directly or through a Reshape."""
        names = {initializer} | {n.output[0] for n in self.proto.graph.node if n.op_type == "Reshape" and n.input[0] == initializer}
        (found,) = [n for n in self.proto.graph.node if n.op_type == op and names & set(n.input)]
        return found


def write(source: Path, target: Onnx, fmt: str, overrides: tuple[str, ...], folder: Path) -> Written:
    opened = model.open(source)
    made = artifact.quantize(
        opened, planning.uniform(opened.weights, target, formats.get(fmt), overrides), folder / "artifact", progress.silent
    )
    path = folder / "model.onnx"
    target.write(made, path, progress.silent)
    proto = onnx.load(path)
    return Written(made, path, proto, {i.name: i for i in proto.graph.initializer})


@pytest.fixture(scope="module", params=one_of(CASES), ids=lambda name: name.replace(", ", "-").replace(" ", "_"))
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    config, fmt, overrides = CASES[request.param]
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)  # zero as made: a lost bias would not show
    made.save_pretrained(folder / "source")
    yield write(folder / "source", Onnx(accuracy_level=0), fmt, overrides, folder)


@pytest.fixture(scope="module")
def attention_only(embedded_model: model.Model, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(embedded_model.path, Onnx(), "fp16", ("self_attn=int4_g32",), tmp_path_factory.mktemp("embedded"))


def at_level(written: Written, level: int, path: Path) -> Path:
    proto = onnx.ModelProto.FromString(written.path.read_bytes())
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = level
    path.write_bytes(proto.SerializeToString())
    return path


def attributes(node: Any) -> dict[str, int]:
    return {a.name: a.i for a in node.attribute}


def is_embedding(weight: Weight) -> bool:
    return weight.kind == "embedding"


def tokens_for(written: Written, count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, written.artifact.config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_every_weight_has_the_operator_and_the_bits_of_the_plan(small: Written) -> None:
    for weight in small.artifact.weights:
        fmt = formats.get(small.plan[weight.name].format)
        if fmt.levels is None:
            stored = onnx.TensorProto.DataType.Name(small.initializers[f"{weight.name}.values"].data_type)
            assert stored == {"fp16": "FLOAT16", "bf16": "BFLOAT16", "fp32": "FLOAT"}[fmt.name]
            continue
        bits = int(math.log2(len(fmt.levels)))
        if is_embedding(weight):
            assert attributes(small.node(f"{weight.name}.codes", "GatherBlockQuantized"))["bits"] == bits
        if not is_embedding(weight) or weight.tied_to:
            node = small.node(f"{weight.name}.codes", "MatMulNBits")
            got = attributes(node)
            assert (got["N"], got["K"], got["bits"], got["accuracy_level"]) == (*weight.shape, bits, 0)
            assert len(node.input) == 3  # g_idx would be silently wrong


def test_no_quantized_weight_is_in_the_file_twice_or_in_float(small: Written) -> None:
    expected = {f"{w.name}.{part}" for w in small.artifact.weights for part in parts_of(small, w)}
    large = {name for name, i in small.initializers.items() if math.prod(i.dims) >= 1024}
    assert large <= expected


def parts_of(written: Written, weight: Weight) -> tuple[str, ...]:
    return ("values",) if formats.get(written.plan[weight.name].format).levels is None else ("codes", "scales")


def test_the_bytes_of_every_weight_are_those_of_the_plan(small: Written) -> None:
    for weight in small.artifact.weights:
        stored = sum(onnx.numpy_helper.to_array(small.initializers[f"{weight.name}.{part}"]).nbytes for part in parts_of(small, weight))
        assert stored == small.plan[weight.name].nbytes, weight.name


def test_stored_codes_and_scales_are_exactly_the_decoded_weights(small: Written) -> None:
    for weight in small.artifact.weights:
        arrays = [onnx.numpy_helper.to_array(small.initializers[f"{weight.name}.{part}"]) for part in parts_of(small, weight)]
        decoded = small.artifact.decoded(weight).numpy()
        if len(arrays) == 1:
            np.testing.assert_array_equal(arrays[0].astype(np.float32), decoded)
            continue
        codes, scales = arrays
        bits = int(math.log2(len(formats.get(small.plan[weight.name].format).levels or ())))
        numbers = np.stack([codes & 15, codes >> 4], -1) if bits == 4 else codes[..., None]
        blocks = numbers.reshape(*scales.shape, -1).astype(np.float32) - 2 ** (bits - 1)
        values = (blocks * scales[..., None]).reshape(weight.shape[0], -1)
        np.testing.assert_array_equal(values[:, : weight.shape[1]], decoded)
        assert not values[:, weight.shape[1] :].any()


@pytest.mark.parametrize("count", [1, 7, 100])
def test_logits_at_level_0_are_those_of_the_decoded_weights(small: Written, count: int) -> None:
    tokens = tokens_for(small, count)
    got = runtimes.get("onnxruntime").open(small.path, 128).logits(tokens)
    single, exact = single_and_double(small, tokens)
    assert got.shape == exact.shape and got.dtype == torch.float32
    assert_as_good_as_float32(got, single, exact)


def single_and_double(written: Written, tokens: list[int]) -> tuple[Tensor, Tensor]:
    module = written.artifact.module()
    single = of_module(module).logits(tokens)
    with torch.inference_mode():
        exact: Tensor = module.double()(torch.tensor([tokens]), use_cache=False).logits[0]
    return single, exact


def assert_as_good_as_float32(got: Tensor, single: Tensor, exact: Tensor) -> None:
    """No further from float64 than another order of summation explains: 8 times what torch's own float32 is off."""
    assert (got - exact).abs().max() <= 8 * (single - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()


def test_a_batch_gives_each_sequence_its_own_logits(small: Written) -> None:
    batch = [tokens_for(small, 9, seed) for seed in (1, 2)]
    session = ort.InferenceSession(small.path, providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"input_ids": np.array(batch)})
    for logits, tokens in zip(got, batch, strict=True):
        assert_as_good_as_float32(torch.from_numpy(logits), *single_and_double(small, tokens))


def test_the_file_names_no_path_of_this_machine(small: Written) -> None:
    content = small.path.read_bytes()
    for trace in (b"site-packages", b".py", str(Path.home()).encode(), str(small.path.parent).encode(), str(Path.cwd()).encode()):
        assert trace not in content
    assert not any(node.doc_string or node.metadata_props for node in small.proto.graph.node)


def test_writing_twice_gives_the_same_bytes_and_prints_nothing(small: Written, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if small.artifact.config.model_type != "gpt2":
        pytest.skip("one architecture is enough: an export takes seconds")
    Onnx(accuracy_level=0).write(small.artifact, tmp_path / "again.onnx", progress.silent)
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "again.onnx").read_bytes() == small.path.read_bytes()


def test_the_default_level_is_off_by_what_int8_inputs_explain(attention_only: Written, embedded_model: model.Model) -> None:
    """A value near the middle of two steps may round either way, and attention spreads that over what follows: so many short
    sequences, most of which have no such value (0.024 in the median)."""
    tokens = embedded_model.tokenizer(verification_text()[:4000])["input_ids"]
    sequences = [tokens[start : start + 16] for start in range(0, 960, 16)]
    module = attention_only.artifact.module()
    exact = [of_module(module).logits(sequence) for sequence in sequences]
    for name, layer in module.named_modules():
        if "self_attn." in name and isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(lambda _, x: (rounded_to_int8(x[0], 32),))
    session = runtimes.get("onnxruntime").open(attention_only.path, 512)
    unexplained = []
    for sequence, logits in zip(sequences, exact, strict=True):
        explained, found = of_module(module).logits(sequence) - logits, session.logits(sequence) - logits
        unexplained.append(float((found - explained).norm() / explained.norm()))
    assert np.median(unexplained) < 0.1


def rounded_to_int8(x: Tensor, run: int) -> Tensor:
    blocks = x.unflatten(-1, (-1, run))
    step = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    rounded: Tensor = ((blocks / step).round() * step).flatten(-2)
    return rounded


def test_level_4_is_right_without_graph_optimizations_too(attention_only: Written, embedded_model: model.Model) -> None:
    tokens = np.array([embedded_model.tokenizer(verification_text()[:500])["input_ids"]])
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    (plain,) = ort.InferenceSession(attention_only.path, options, providers=["CPUExecutionProvider"]).run(None, {"input_ids": tokens})
    (usual,) = ort.InferenceSession(attention_only.path, providers=["CPUExecutionProvider"]).run(None, {"input_ids": tokens})
    assert np.abs(plain - usual).max() < 0.05 * np.abs(usual).max()  # garbage scales are off by 100 %


def test_attention_only_int4_keeps_perplexity_within_one_percent(
    attention_only: Written, embedded_model: model.Model, tmp_path: Path
) -> None:
    assert {e.format for e in attention_only.plan.entries if "self_attn" in e.weight} == {"int4_g32"}
    tokens = embedded_model.tokenizer(verification_text()[:40_000])["input_ids"][:8192]
    floats = of_module(embedded_model.module())
    written = runtimes.get("onnxruntime").open(attention_only.path, 512)
    # sees a wrong layout (swapped nibbles: 3.9), hardly bad rounding: noise of half a standard deviation on these weights gives 1.007
    assert perplexity(written, tokens) / perplexity(floats, tokens) <= 1.01
    exact = runtimes.get("onnxruntime").open(at_level(attention_only, 0, tmp_path / "exact.onnx"), 512)
    assert_as_good_as_float32(exact.logits(tokens[:256]), *single_and_double(attention_only, tokens[:256]))


def perplexity(session: session.Session, tokens: list[int]) -> float:
    losses = []
    for start in range(0, len(tokens) - 255, 256):
        part = tokens[start : start + 256]
        losses.append(nn.functional.cross_entropy(session.logits(part)[:-1], torch.tensor(part[1:])).item())
    return math.exp(sum(losses) / len(losses))


def verification_text() -> str:
    return (files("fewbits") / "embedded" / "text" / "verification.txt").read_text()


def test_the_file_says_how_and_from_what_it_was_made(attention_only: Written) -> None:
    props = {p.key: p.value for p in attention_only.proto.metadata_props}
    about = attention_only.artifact.provenance
    assert props["fewbits.accuracy_level"] == str(ACCURACY_LEVEL) == "4"
    assert (props["fewbits.source"], props["fewbits.source_sha256"], props["fewbits.version"]) == (
        about.source,
        about.sha256,
        about.fewbits,
    )
    assert props["fewbits.plan"] == "13 x fp16, 16 x int4_g32"
    levels = {attributes(n)["accuracy_level"] for n in attention_only.proto.graph.node if n.op_type == "MatMulNBits"}
    assert levels == {ACCURACY_LEVEL}


@pytest.mark.parametrize(("name", "word"), [("q4_k", "minimum"), ("q3_k", "8 levels"), ("q3_s6", "8 levels")])
def test_formats_that_onnx_runtime_cannot_execute_are_refused_with_a_reason(name: str, word: str) -> None:
    weight = Weight("a", (64, 256), "mlp", "fp16")
    assert word in (targets.get("onnx").accepts(weight, formats.get(name)) or "")


def test_formats_are_recognised_by_their_values_not_their_names() -> None:
    weight, target = Weight("a", (64, 256), "mlp", "fp16"), targets.get("onnx")
    other = replace(formats.get("int4_g32"), name="other")
    assert target.accepts(weight, other) is None
    assert target.nbytes(weight, other) == target.nbytes(weight, formats.get("q4_0")) == 64 * (128 + 4 * 8)
    assert target.accepts(weight, replace(other, group=24)) == "ONNX Runtime has no blocks of 24 columns"


def test_pricing_loads_neither_torch_nor_onnx() -> None:
    code = (
        "import sys; from fewbits import formats, targets; from fewbits.model import Weight\n"
        "w = Weight('a', (64, 172), 'mlp', 'fp16'); t = targets.get('onnx')\n"
        "[t.nbytes(w, f) for f in formats.all().values() if not (f.fits(w.shape) or t.accepts(w, f))]\n"
        "print([m for m in ('torch', 'onnx', 'onnxruntime') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("architecture", ["T5ForConditionalGeneration", "BertForMaskedLM", "MixtralForCausalLM"])
def test_models_that_cannot_be_written_are_refused_before_any_work(architecture: str) -> None:
    import transformers

    config = getattr(transformers, architecture.partition("For")[0] + "Config")(architectures=[architecture])
    assert targets.get("onnx").supports(config, None)
    assert targets.get("onnx").supports(LLAMA, None) is None


@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "flipped"])
def test_a_damaged_file_is_an_input_error_with_a_hint(attention_only: Written, tmp_path: Path, damage: str) -> None:
    whole = attention_only.path.read_bytes()
    broken = {"truncated": whole[:-1000], "empty": b"", "text": b"not a model\n" * 40, "flipped": b"\xff" + whole[1:]}[damage]
    path = tmp_path / "broken.onnx"
    path.write_bytes(broken)
    with pytest.raises(InputError) as caught:
        runtimes.get("onnxruntime").open(path, 16)
    assert caught.value.hint


def test_a_model_of_another_kind_is_refused_by_its_inputs(tmp_path: Path) -> None:
    value = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1]) for n in ("x", "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", value[:1], value[1:])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10), tmp_path / "relu.onnx")
    with pytest.raises(InputError, match="inputs"):
        runtimes.get("onnxruntime").open(tmp_path / "relu.onnx", 16)


def test_runtimes_are_chosen_by_the_file(attention_only: Written) -> None:
    assert runtimes.for_file(attention_only.path).name == "onnxruntime"
    assert runtimes.for_file(attention_only.artifact.path).name == "torch"
    session = runtimes.get("torch").open(attention_only.artifact.path, 16)
    torch.testing.assert_close(session.logits([1, 2, 3]), of_module(attention_only.artifact.module()).logits([1, 2, 3]), rtol=0, atol=0)
    assert runtimes.get("onnxruntime").version().startswith("onnxruntime 1.")


def onnx_bytes(initializer: Any) -> int:
    import onnx

    return int(onnx.numpy_helper.to_array(initializer).nbytes)


def test_a_model_with_zero_points_runs_in_onnx_runtime(tmp_path: Path) -> None:
    """Embedding, tied output and linear layers, of 2, 4 and 8 bits: the whole way through the graph."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LLAMA).save_pretrained(tmp_path / "source")
    overrides = ("q_proj=int8_channel_asym", "k_proj=int2_g32_asym", "down_proj=int2_g32", "v_proj=int4_tensor", "o_proj=int4_g64_asym")
    made = write(tmp_path / "source", Onnx(accuracy_level=0), "int4_g32_asym", overrides, tmp_path)
    assert not made.plan.fallbacks and {e.format for e in made.plan.entries} == {"int4_g32_asym", *(o.split("=")[1] for o in overrides)}
    stored = {name: onnx_bytes(made.initializers[name]) for name in made.initializers}
    for entry in made.plan.entries:
        assert sum(size for name, size in stored.items() if name.startswith(f"{entry.weight}.")) == entry.nbytes
    tokens = tokens_for(made, 20)
    got = runtimes.get("onnxruntime").open(made.path, 128).logits(tokens)
    assert_as_good_as_float32(got, *single_and_double(made, tokens))
