"""Every architecture of the table: llama.cpp computes from our file what transformers computes, and what it would not is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from gguf_models import GEMMA, GGUF, MODELS, ROPE, TINY, check_against_llama_cpp, needs_llama_cpp, save_random, write

from fewbits import embedded, model
from fewbits.model.gguf import architectures
from fewbits.model.gguf.architectures import Place, Places, metadata, table
from fewbits.model.gguf.architectures.numbers import tidy
from fewbits.model.tokenizer import load_tokenizer
from fewbits.targets.gguf import header


@needs_llama_cpp
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_what_we_say(name: str, tmp_path: Path) -> None:
    source = model.open(save_random(MODELS[name](), tmp_path / "tiny"))
    for fmt in ("fp32", "int8_channel"):
        check_against_llama_cpp(*write(source, fmt, [], tmp_path / fmt))


def without(*keys: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A file that leaves these keys out."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        known = architectures.metadata
        monkeypatch.setattr(header.architectures, "metadata", lambda c: {k: v for k, v in known(c).items() if not k.endswith(keys)})

    return patch


def placed(change: Callable[[tuple[Place, ...]], tuple[Place, ...]]) -> Callable[[pytest.MonkeyPatch], None]:
    """A file with tensors that are changed on their way."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        known = Places.find

        def find(self: Places, parameter: str) -> tuple[Place, ...] | None:
            found = known(self, parameter)
            return found and change(found)

        monkeypatch.setattr(Places, "find", find)

    return patch


def swapped(places: tuple[Place, ...]) -> tuple[Place, ...]:
    if len(places) < 2:
        return places
    return replace(places[0], rows=places[1].rows), replace(places[1], rows=places[0].rows)


TRAPS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "rows in the wrong order": ("llama", placed(lambda places: tuple(replace(place, rows=None) for place in places))),
    "norms without the one": ("gemma 2", placed(lambda places: tuple(replace(place, added=0.0) for place in places))),
    "no window": ("gemma 2", without("attention.sliding_window")),
    "no cap on attention": ("gemma 2", without("attn_logit_softcapping")),
    "no cap on logits": ("gemma 2", without("final_logit_softcapping")),
    "another local rotation": ("gemma 3, scaled and capped", without("rope.freq_base_swa")),
    "no scaling of the global rotation": ("gemma 3, scaled and capped", without("rope.scaling.factor")),
    "no factor of attention": ("phi 3, long", without("rope.scaling.attn_factor")),
    "the whole head rotated": ("phi 3, a part of each head", without("rope.dimension_count")),
    "gate and up exchanged": ("mixtral", placed(swapped)),
}


@needs_llama_cpp
@pytest.mark.parametrize("trap", TRAPS)
def test_what_is_left_out_is_noticed(trap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these is a mistake that llama.cpp loads without a word."""
    name, patch = TRAPS[trap]
    source = model.open(save_random(MODELS[name](), tmp_path / "tiny"))
    patch(monkeypatch)
    with pytest.raises(AssertionError, match="times as far"):
        check_against_llama_cpp(*write(source, "fp32", [], tmp_path))


def phi(**settings: Any) -> Any:
    return transformers.Phi3Config(**{**TINY, **settings})


REFUSED: list[tuple[Any, str | None]] = [
    (transformers.GPTNeoXConfig(), "`gpt_neox` is not known here (known: llama, mistral, mixtral,"),
    (transformers.LlamaConfig(hidden_act="gelu"), "computes silu, the model gelu"),
    (transformers.Qwen3Config(attention_bias=True), "has `attention_bias = False` built in, the model has True"),
    (transformers.GPT2Config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    (transformers.LlamaConfig(rope_parameters={**ROPE, "rope_type": "dynamic", "factor": 2.0}), "no rotary scaling of type `dynamic`"),
    (transformers.Qwen2Config(rope_parameters={**ROPE, "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0,
     "high_freq_factor": 4.0, "original_max_position_embeddings": 64}), "no rotary scaling of type `llama3`"),
    (transformers.LlamaConfig(architectures=["LlamaForSequenceClassification"]), "the model is a LlamaForSequenceClassification"),
    (transformers.BertConfig(architectures=["BertForMaskedLM"]), "computes what BertModel does"),
    (transformers.SmolLM3Config(**TINY, no_rope_layer_interval=2), "no_rope_layer_interval"),
    (transformers.SmolLM3Config(**TINY, no_rope_layers=[1, 0]), "every 4th layer without rotation"),
    (transformers.Gemma2Config(**{**GEMMA, "query_pre_attn_scalar": 24}), "scales attention by 1 / sqrt(16) at 2 layers"),
    (transformers.Gemma2Config(**GEMMA, layer_types=["full_attention"] * 2), "every 2th layer full attention"),
    (transformers.Gemma2Config(**GEMMA, final_logit_softcapping=None), "always caps logits"),
    (transformers.Gemma2Config(**GEMMA, tie_word_embeddings=False), "`tie_word_embeddings = True` built in"),
    (transformers.Gemma3TextConfig(**GEMMA, attn_logit_softcapping=50.0), "attn_logit_softcapping"),
    (transformers.Gemma3TextConfig(**GEMMA, use_bidirectional_attention=True), "use_bidirectional_attention"),
    (transformers.Qwen2MoeConfig(norm_topk_prob=True), "has `norm_topk_prob = False` built in"),
    (transformers.Qwen3MoeConfig(norm_topk_prob=False), "has `norm_topk_prob = True` built in"),
    (transformers.Qwen3MoeConfig(norm_topk_prob=True, mlp_only_layers=[0]), "mlp_only_layers"),
    (transformers.LlamaConfig(), None),
    (transformers.BertConfig(architectures=["BertModel"]), None),
]  # fmt: skip


@pytest.mark.parametrize(("config", "reason"), REFUSED)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(config: Any, reason: str | None) -> None:
    found = architectures.unsupported(config)
    assert found is None if reason is None else reason in (found or "")


def test_the_target_refuses_with_that_reason() -> None:
    tokenizer = load_tokenizer(embedded.MODEL)
    assert GGUF.supports(transformers.GPTNeoXConfig(), tokenizer) == architectures.unsupported(transformers.GPTNeoXConfig())
    assert GGUF.supports(transformers.LlamaConfig(vocab_size=2048), tokenizer) is None


def test_a_window_limits_the_context_where_llama_cpp_has_none() -> None:
    config = transformers.MistralConfig(max_position_embeddings=32768, sliding_window=4096)
    assert metadata(config)["llama.context_length"] == 4096
    assert metadata(phi(sliding_window=40))["phi3.context_length"] == 40
    assert metadata(MODELS["gemma 2"]())["gemma2.context_length"] == 128


@pytest.mark.parametrize("name", MODELS)
def test_metadata_gives_back_the_config(name: str) -> None:
    """Of what changes the function: a config from the metadata writes the metadata that it was read from."""
    config = MODELS[name]()
    fields = {"general.architecture": table.of(config).gguf, **architectures.metadata(config)}
    factors = {tensor: values.tolist() for tensor, values in architectures.factors(config).items()}
    tensors = ["output.weight"] * (not config.tie_word_embeddings)
    again = architectures.config_of(fields, tensors, factors)
    assert {key: tidy(value) for key, value in metadata(again).items()} == {key: tidy(value) for key, value in metadata(config).items()}
    assert architectures.unsupported(again) is None
