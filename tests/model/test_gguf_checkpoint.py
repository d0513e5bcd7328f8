"""Opening a GGUF gives back the transformers model that it was made from."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_models import GGUF, MODELS, check_against_llama_cpp, needs_llama_cpp, save_random, write

from fewbits import formats, model
from fewbits.artifact.draft import Draft
from fewbits.benchmarks.peers import ggml
from fewbits.errors import InputError
from fewbits.methods import rtn
from fewbits.model import checkpoints
from fewbits.model.gguf import architectures
from fewbits.targets.gguf import types

ONE_EACH = {config().model_type: name for name, config in MODELS.items()}.values()  # the last of each architecture


@pytest.mark.parametrize("name", MODELS)
def test_a_gguf_gives_back_the_tensors_it_was_made_of(name: str, tmp_path: Path) -> None:
    source = model.open(save_random(MODELS[name](), tmp_path / "tiny"))
    made, file = write(source, "fp32", ["attn=q8_0"], tmp_path)
    again = model.open(file)
    assert [(weight.name, weight.shape, weight.transposed, weight.tied_to) for weight in again.weights] == [
        (weight.name, weight.shape, weight.transposed, weight.tied_to) for weight in source.weights
    ]
    for weight in again.weights:
        assert torch.equal(again.load(weight), made.decoded(weight)), weight.name
        assert weight.dtype == ("fp16" if "attn" in weight.name else "fp32")
    shifted = architectures.of(source.config).unit_norms  # the file holds 1 + weight, whose last digits differ
    for rest in again.rest:
        assert torch.equal(again.tensor(rest) + shifted, source.tensor(rest) + shifted), rest
    tokens = torch.tensor([made.tokenizer.encode("Return a list of the names")])
    with torch.no_grad():
        found, expected = again.module()(tokens).logits, made.module()(tokens).logits
    if shifted:
        # each of at most 25 norms in a row is off by half a unit of the last place of 1 + weight, in the relative error of its output
        assert (found - expected).norm() < 25 * 2.0**-24 * 20 * expected.norm()
    else:
        assert torch.equal(found, expected)


def keys_of(path: Path) -> dict[str, tuple[object, ...]]:
    """Value and type of every key."""
    fields = gguf.GGUFReader(path).fields.items()
    return {name: (field.contents(), *field.types) for name, field in fields if not name.startswith("GGUF.")}


def with_odd_keys(path: Path, out: Path) -> Path:
    """The same file with keys that nobody here knows, other ones of tools, and another alignment."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, "")
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "fewbits.", "general.quantized_by")):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.kv_data[0][name] = gguf.gguf_writer.GGUFValue(field.contents(), field.types[0], inner)
    writer.add_custom_alignment(64)
    writer.add_author("Ada")
    writer.add_name("Odd One")
    writer.add_quantized_by("somebody else")
    writer.add_string("quantize.imatrix.file", "of the old quantization")
    writer.add_key_value("odd.bytes", [1, 2, 255], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8)
    writer.add_key_value("odd.shorts", [-1, 300], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT16)
    writer.add_array("odd.texts", ["", "ein Wort", "\u2581"])
    writer.add_float64("odd.double", 0.1)
    writer.add_uint64("odd.large", 2**63 + 1)
    writer.add_bool("odd.truth", True)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16", "q8_0", "q6_k"])
def test_a_gguf_of_any_type_can_be_quantized_again(kind: str, tmp_path: Path) -> None:
    config = MODELS["llama, untied, with biases"]()
    config.hidden_size, config.intermediate_size = 256, 256
    source = model.open(save_random(config, tmp_path / "tiny"))
    source.tokenizer.chat_template = "{{ messages }}"
    source.tokenizer.save_pretrained(source.path)
    first, file = write(source, kind, [], tmp_path / "first")
    second, again = write(model.open(file), "q4_0", [], tmp_path / "second")
    assert second.tokenizer.chat_template == "{{ messages }}"
    assert second.tokenizer.encode("def f(x): return 1\n") == first.tokenizer.encode("def f(x): return 1\n")
    for weight in first.weights:  # nothing but the rounding to q4_0 happens to what the file held
        w = first.decoded(weight)
        assert torch.equal(second.parts(weight)["blocks"], rtn.quantize(w, formats.get("q4_0"))["blocks"]), weight.name
    one, two = keys_of(file), keys_of(again)
    changed = {name for name in one | two if one.get(name) != two.get(name)}
    assert changed == {"general.file_type", "fewbits.source_sha256", "fewbits.source", "fewbits.plan", "fewbits.plan_sha256"}


@pytest.mark.parametrize("name", ONE_EACH)
def test_all_metadata_survives_a_second_quantization(name: str, tmp_path: Path) -> None:
    source = model.open(save_random(MODELS[name](), tmp_path / "tiny"))
    file = with_odd_keys(write(source, "fp16", [], tmp_path / "first")[1], tmp_path / "odd.gguf")
    opened = model.open(file)
    made, again = write(opened, "q8_0", [], tmp_path / "second")
    one, two = keys_of(file), keys_of(again)
    own = {"general.file_type", "general.quantized_by", *(key for key in two if key.startswith("fewbits."))}
    gone = {"general.alignment", "quantize.imatrix.file"}
    assert {key for key in one | two if one.get(key) != two.get(key)} == own | gone
    assert not gone & two.keys() and two["general.quantized_by"][0] == "fewbits" and two["general.file_type"][0] == 7
    assert set(types(again).values()) == {"q8_0"}
    # before the work it is known to the byte what the file will weigh
    assert GGUF.overhead(Draft(opened, made.plan)) + made.plan.nbytes == again.stat().st_size


@needs_llama_cpp
@pytest.mark.parametrize("name", ["llama", "gemma 3, scaled and capped", "phi 3, long", "qwen2 moe"])
def test_llama_cpp_runs_what_was_quantized_again(name: str, tmp_path: Path) -> None:
    source = model.open(save_random(MODELS[name](), tmp_path / "tiny"))
    file = with_odd_keys(write(source, "fp16", [], tmp_path / "first")[1], tmp_path / "odd.gguf")
    check_against_llama_cpp(*write(model.open(file), "q8_0", [], tmp_path / "second"))


def test_a_file_that_is_not_from_here_may_leave_a_dimension_out(tmp_path: Path) -> None:
    """llama.cpp's converter squeezes the gate of the shared expert, a matrix with one row."""
    source = model.open(save_random(MODELS["qwen2 moe"](), tmp_path / "tiny"))
    _, file = write(source, "fp32", [], tmp_path)
    reader, writer = gguf.GGUFReader(file), gguf.GGUFWriter(tmp_path / "squeezed.gguf", "")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.kv_data[0][name] = gguf.gguf_writer.GGUFValue(field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data.squeeze(), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    opened = model.open(tmp_path / "squeezed.gguf")
    assert [weight.shape for weight in opened.weights] == [weight.shape for weight in source.weights]


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    place = tmp_path_factory.mktemp("content")
    return write(model.open(save_random(MODELS["llama"](), place / "tiny")), "q8_0", [], place)[1].read_bytes()


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 50, 1000, 20_000, -10_000, -64])
def test_a_truncated_gguf_is_an_input_error(content: bytes, keep: int, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(content[:keep])
    with pytest.raises(InputError, match="not a GGUF file that can be read"):
        model.open(tmp_path / "broken.gguf")


def test_damaged_metadata_is_an_input_error(content: bytes, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    file = tmp_path / "broken.gguf"
    refused = 0
    for _ in range(60):
        broken = bytearray(content)
        for place in random.integers(8, 1200, 4):
            broken[place] = random.integers(256)
        file.write_bytes(broken)
        try:
            model.open(file).checkpoint.save_assets(tmp_path)
        except InputError:
            refused += 1
    assert refused > 20  # much of the text can change harmlessly; nothing may raise anything else


def test_another_file_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model at all, but long enough to have a header\n" * 10)
    with pytest.raises(InputError, match="magic"):
        checkpoints.open(tmp_path / "text.gguf")


def test_a_tensor_without_a_place_is_an_input_error(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "llama")
    for key, value in {"context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(64)
    writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match=r"`blk\.0\.attn_sinks\.weight`, which LlamaForCausalLM has no place for"):
        model.open(tmp_path / "odd.gguf")


def test_an_architecture_that_is_not_known_is_an_input_error(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match="`mamba` is not known here"):
        model.open(tmp_path / "odd.gguf")


DECODABLE = [kind for kind in gguf.quants._type_traits if gguf.GGML_QUANT_SIZES[kind][0] > 1]  # floats are tested above


@pytest.mark.parametrize("kind", DECODABLE, ids=lambda kind: kind.name)
def test_every_type_that_gguf_decodes_can_be_opened(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    """A model with one weight of this type, in random bytes whose scales ggml finds finite; ggml's own decoder is the judge."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(0).integers(0, 256, (256, 256 // block * block_bytes), dtype=np.uint8)
    expected = ggml.dequantize_any(int(kind), stored, 256 * 256).reshape(256, 256)
    sane = np.isfinite(expected).all(1) & (np.abs(expected).max(1) < 1e30)
    assert sane.any()
    rows = np.resize(np.flatnonzero(sane), 256)
    stored, expected = stored[rows], expected[rows]

    sizes = {"context_length": 64, "embedding_length": 256, "block_count": 1, "feed_forward_length": 256}
    writer = gguf.GGUFWriter(tmp_path / "any.gguf", "llama")
    for key, value in sizes.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(256)
    for name in ("token_embd", *(f"blk.0.{part}" for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up"))):
        writer.add_tensor(f"{name}.weight", np.zeros((256, 256), np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(256, np.float32))
    writer.add_tensor("blk.0.ffn_down.weight", stored, raw_shape=stored.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    opened = model.open(tmp_path / "any.gguf")
    weight = next(w for w in opened.weights if w.name.endswith("down_proj"))
    found = opened.load(weight).numpy()
    # both in float32, in another order of operations: a few roundings of the largest value in the row
    assert (np.abs(found - expected) <= 4 * 2.0**-24 * np.abs(expected).max(1, keepdims=True)).all()
