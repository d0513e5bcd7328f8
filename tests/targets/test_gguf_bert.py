"""An encoder in GGUF: llama.cpp's embeddings are transformers', as its roundings and its curve of gelu explain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from bert_models import save_bert
from gguf_models import GGUF, LLAMA_CPP, TEXT, needs_llama_cpp, rms, rounding_like_llama_cpp, write

from fewbits import formats, model, pipeline, planning
from fewbits.artifact import Artifact
from fewbits.errors import InputError
from fewbits.targets.gguf import types
from fewbits.verification import files
from fewbits.verification.embeddings import EmbeddingVerdict


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> model.Model:
    return model.open(save_bert(tmp_path_factory.mktemp("bert") / "tiny"))


def embeddings(path: Path, tokens: list[int], pooling: str | None = None) -> torch.Tensor:
    """Of every token, or of the text, by llama.cpp."""
    with closing(LLAMA_CPP.open(path, 128)) as session:
        assert session.pooling == pooling
        return session.embeddings(tokens)


def attention_like_llama_cpp(_: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _mask: Any, scaling: float, **__: Any) -> Any:
    """Key after key, with the sum of values in float16: in an encoder, where every token attends to all, that is most of its error."""
    q, k, v = (x.half().float() for x in (q, k, v))
    scores = (q @ k.transpose(-1, -2)) * scaling
    top, weight, total = torch.full_like(scores[..., :1], -torch.inf), torch.zeros_like(scores[..., :1]), torch.zeros_like(q)
    for j in range(scores.shape[-1]):
        higher = torch.maximum(top, scores[..., j : j + 1])
        shrunk, own = (top - higher).exp(), (scores[..., j : j + 1] - higher).exp()
        total = ((total * shrunk).half().float() + v[..., j : j + 1, :] * own).half().float()
        top, weight = higher, weight * shrunk + own
    return (total / weight).transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("like llama.cpp", attention_like_llama_cpp)


def hidden(made: Artifact, tokens: Sequence[int], like_llama_cpp: bool = False) -> torch.Tensor:
    module = made.module()
    with ExitStack() as rounding, torch.no_grad():
        if like_llama_cpp:
            for layer in module.encoder.layer:
                layer.intermediate.intermediate_act_fn = transformers.activations.ACT2FN["gelu_pytorch_tanh"]
            module.config._attn_implementation = "like llama.cpp"
            rounding.enter_context(rounding_like_llama_cpp(module, made))
        found: torch.Tensor = module(torch.tensor([tokens])).last_hidden_state[0]
    return found


@needs_llama_cpp
@pytest.mark.parametrize("fmt", ["fp32", "int8_channel", "q4_0"])
def test_llama_cpps_embeddings_are_those_of_the_decoded_weights(fmt: str, source: model.Model, tmp_path: Path) -> None:
    made, file = write(source, fmt, [], tmp_path)
    tokens = made.tokenizer.encode(TEXT)
    expected, imitated = hidden(made, tokens), hidden(made, tokens, like_llama_cpp=True)
    found = embeddings(file, tokens)
    ratio = rms(found - expected) / rms(imitated - expected)
    assert ratio < 1.5, f"llama.cpp is {ratio:.2f} times as far from the decoded weights as its roundings explain"
    # one minus a cosine is half the square of the angle
    turned, explained = (1 - torch.cosine_similarity(one.double(), expected.double()).mean() for one in (found, imitated))
    assert turned < 1.5**2 * explained < (1e-5 if fmt == "fp32" else 1e-3)


@needs_llama_cpp
@pytest.mark.parametrize("said", [{"pooling_mode_mean_tokens": True}, {"pooling_mode": "cls", "pooling_mode_mean_tokens": False}])
def test_a_text_is_pooled_as_sentence_transformers_says(said: dict[str, object], source: model.Model, tmp_path: Path) -> None:
    made, _ = write(source, "fp32", [], tmp_path)
    (made.path / "1_Pooling").mkdir()
    (made.path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **said}))
    GGUF.write(made, tmp_path / "pooled.gguf", lambda steps, *_: steps)
    tokens = made.tokenizer.encode(TEXT)
    expected = hidden(made, tokens)
    expected = expected[0] if "pooling_mode" in said else expected.mean(0)
    found = embeddings(tmp_path / "pooled.gguf", tokens, "cls" if "pooling_mode" in said else "mean")[0]
    assert torch.cosine_similarity(found, expected, 0) > 0.9999


def test_nothing_is_said_of_pooling_that_the_model_does_not_say(source: model.Model, tmp_path: Path) -> None:
    _, file = write(source, "fp32", [], tmp_path)
    fields = {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}
    assert "bert.pooling_type" not in fields and fields["bert.attention.causal"] is False


def test_token_types_stay_in_float32(source: model.Model) -> None:
    plan = planning.uniform(source.weights, GGUF, formats.get("q8_0"))
    entry = plan["embeddings.token_type_embeddings"]
    assert entry.format == "fp32" and entry.fallback and "in float32" in entry.reason


def test_the_model_comes_back(source: model.Model, tmp_path: Path) -> None:
    made, file = write(source, "q8_0", [], tmp_path)
    again = model.open(file)
    assert [(weight.name, weight.shape) for weight in again.weights] == [(weight.name, weight.shape) for weight in source.weights]
    for weight in again.weights:
        assert torch.equal(again.load(weight), made.decoded(weight)), weight.name
    assert types(file) == {entry.weight: entry.format for entry in made.plan.entries}
    assert again.tokenizer.encode(TEXT) == source.tokenizer.encode(TEXT)


@needs_llama_cpp
def test_llama_cpps_encoder_has_no_logits(source: model.Model, tmp_path: Path) -> None:
    """It would hand out a null pointer for them."""
    _, file = write(source, "fp32", [], tmp_path)
    with closing(LLAMA_CPP.open(file, 128)) as session, pytest.raises(InputError, match="no logits"):
        session.logits([2, 7, 3])


@needs_llama_cpp
def test_a_text_is_read_at_once_however_long(tmp_path: Path) -> None:
    """A decoder takes 512 tokens in one call and then the next; in an encoder every token attends to all."""
    made, file = write(model.open(save_bert(tmp_path / "long", positions=700)), "fp32", [], tmp_path)
    tokens = [2, *range(5, 365), *range(5, 300), 3]
    with closing(LLAMA_CPP.open(file, 700)) as session:
        cosines = torch.cosine_similarity(session.embeddings(tokens), hidden(made, tokens))
    assert len(cosines) == len(tokens) > 512 and cosines.min() > 0.9999


@needs_llama_cpp
@pytest.mark.parametrize("pooled", [False, True])
def test_quantizing_an_encoder_ends_with_a_verdict_on_its_embeddings(pooled: bool, tmp_path: Path) -> None:
    folder = save_bert(tmp_path / "bert")
    if pooled:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    found, rough = (
        pipeline.quantize(folder, tmp_path / f"{fmt}.gguf", format=fmt, method="rtn", tokens=1024, min_cosine=0.999).verdict
        for fmt in ("q8_0", "q4_0")
    )
    assert isinstance(found, EmbeddingVerdict) and isinstance(rough, EmbeddingVerdict)
    assert found.passed and found.runtime == "llama.cpp" and found.pooling == ("mean" if pooled else None)
    assert not rough.passed and rough.cosine_mean < found.cosine_mean < (found.cosine_floor or 0) <= 1 + 1e-9
    again = files.verify(tmp_path / "q8_0.gguf", folder, tokens=1024, no_floor=True)
    assert isinstance(again, EmbeddingVerdict) and again.cosine_mean == found.cosine_mean
    made = files.verify(tmp_path / "q8_0.gguf.work" / "artifact", folder, tokens=1024)
    assert isinstance(made, EmbeddingVerdict) and made.runtime == "torch" and made.cosine_mean > 0.999


def test_an_encoder_has_no_budget_and_no_kl(tmp_path: Path) -> None:
    folder = save_bert(tmp_path / "bert")
    for budget, word in (({"size": "6bpw"}, "an encoder has none"), ({"format": "q8_0", "max_kl": 0.1}, "`--max-kl` does not go with")):
        with pytest.raises(InputError, match=word):
            pipeline.quantize(folder, tmp_path / "out.gguf", **budget)  # type: ignore[arg-type]
    assert not (tmp_path / "out.gguf.work").exists()


@needs_llama_cpp
def test_a_file_of_llama_cpps_converter_has_no_pooler(source: model.Model, tmp_path: Path) -> None:
    """It leaves `pooler.dense` out, because no embedding is made with it: such a file opens, and its embeddings stay."""
    made, file = write(source, "fp32", [], tmp_path)
    reader, writer = gguf.GGUFReader(file), gguf.GGUFWriter(tmp_path / "bare.gguf", "")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            writer.kv_data[0][name] = gguf.gguf_writer.GGUFValue(field.contents(), field.types[0], [*field.types, None][1])
    for tensor in reader.tensors:
        if not tensor.name.startswith("cls."):
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _, again = write(model.open(tmp_path / "bare.gguf"), "fp32", [], tmp_path / "again")
    tokens = made.tokenizer.encode(TEXT)
    assert torch.equal(embeddings(again, tokens), embeddings(file, tokens))
