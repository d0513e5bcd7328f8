"""Opening a GGUF gives back the transformers model that it was made from."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from test_gguf import MODELS, save_random, write

from fewbits import checkpoints, model
from fewbits.benchmarks import ggml
from fewbits.errors import InputError


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
    for rest in again.rest:
        assert torch.equal(again.tensor(rest), source.tensor(rest)), rest
    tokens = torch.tensor([made.tokenizer.encode("Return a list of the names")])
    with torch.no_grad():
        assert torch.equal(again.module()(tokens).logits, made.module()(tokens).logits)


def test_a_gguf_can_be_quantized_again(tmp_path: Path) -> None:
    source = model.open(save_random(MODELS["llama, untied, with biases"](), tmp_path / "tiny"))
    source.tokenizer.chat_template = "{{ messages }}"
    source.tokenizer.save_pretrained(source.path)
    first, file = write(source, "q8_0", [], tmp_path / "first")
    second, again = write(model.open(file), "q4_0", [], tmp_path / "second")
    assert second.tokenizer.chat_template == "{{ messages }}"
    assert second.tokenizer.encode("def f(x): return 1\n") == first.tokenizer.encode("def f(x): return 1\n")
    one, two = ({name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()} for path in (file, again))
    changed = {name for name in one | two if one.get(name) != two.get(name)}
    assert changed <= {"general.name", "general.file_type", "fewbits.source", "fewbits.source_sha256", "fewbits.plan"}


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    place = tmp_path_factory.mktemp("content")
    return write(model.open(save_random(MODELS["llama"](), place / "tiny")), "q8_0", [], place)[1].read_bytes()


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 50, 1000, 60_000, -100_000, -64])
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
