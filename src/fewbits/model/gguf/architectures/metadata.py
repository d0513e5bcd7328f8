"""A transformers config as the keys of a GGUF file, and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fewbits.errors import UnknownKindError
from fewbits.model.gguf.architectures import rotary
from fewbits.model.gguf.architectures.numbers import tidy
from fewbits.model.gguf.architectures.table import KNOWN, Architecture, Value, attribute, of

_ELSEWHERE = "open the original checkpoint instead"


def metadata(config: Any) -> dict[str, Value]:
    """Every key that llama.cpp needs to build the graph, in a fixed order."""
    row = of(config)
    attributes = {key: attribute(config, name) for key, name in row.keys.items()}
    values: dict[str, Value] = {key: value for key, value in attributes.items() if value is not None} | dict(row.constants)
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window and not row.windows and (kinds is None or "sliding_attention" in kinds):
        # llama.cpp attends to all positions; within the window's length that gives the same result
        values["context_length"] = min(int(values["context_length"]), int(window))
    if row.rotary:
        values |= rotary.metadata(config)
    return {_full(row, key): value for key, value in values.items()}


def config_of(fields: Mapping[str, Any], tensors: Collection[str], factors: Mapping[str, list[float]]) -> Any:
    """The transformers config that a GGUF's metadata describes. `factors`: those of its rotary frequencies, by the name of their tensor."""
    import transformers

    row = _row_of(fields)
    stored = {key.removeprefix(f"{row.gguf}."): value for key, value in fields.items()}
    settings: dict[str, Any] = {name: tidy(stored[key]) for key, name in row.keys.items() if key in stored}
    settings.setdefault("vocab_size", len(fields.get("tokenizer.ggml.tokens", ())))
    settings |= row.granted
    if row.rotary:
        settings.setdefault("num_key_value_heads", settings["num_attention_heads"])
        settings.pop("rotary_dim", None)
        if not row.partial:
            settings.setdefault("head_dim", rotary.head_width(settings))
        settings["rope_parameters"] = rope = rotary.parameters_of(row, stored, settings, factors)
        if rope.get("rope_type") == "longrope":  # Phi-3's config needs it in both places
            settings["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    if row.model_type == "llama":
        settings |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    if row.model_type == "mistral":
        settings["sliding_window"] = None  # llama.cpp attends to all positions
    if row.model_type == "qwen2_moe":
        settings["qkv_bias"] = "blk.0.attn_q.bias" in tensors
    if row.windows:
        settings.setdefault("sliding_window", 4096)
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        settings[f"{role}_token_id"] = fields.get(f"tokenizer.ggml.{key}_token_id")
    settings["tie_word_embeddings"] = "output.weight" not in tensors
    settings["architectures"] = [row.class_name]
    config = getattr(transformers, row.class_name).config_class(**settings)
    if row.scale:
        config.query_pre_attn_scalar = int(row.scale(config))
    llama3 = factors.get(rotary.FACTORS[0])
    return config if llama3 is None else rotary.with_llama3(config, settings, llama3)


def _row_of(fields: Mapping[str, Any]) -> Architecture:
    """Several architectures of transformers are one of llama.cpp's: a Mistral is read as a Llama, which computes the same, unless
    transformers lets no Llama have so many heads at this width; a mixture under that name is read as a Mixtral."""
    name = fields.get("general.architecture")
    mixture = bool(fields.get(f"{name}.expert_count"))
    rows = [row for row in KNOWN if row.gguf == name and ("expert_count" in row.keys) == mixture]
    width, heads = (fields.get(f"{name}.{key}") for key in ("embedding_length", "attention.head_count"))
    if isinstance(width, int) and isinstance(heads, int) and heads > 0 and width % heads:
        rows = [row for row in rows if row.model_type != "llama"]
    row = next(iter(rows), None)
    if row is None:
        known = ", ".join(dict.fromkeys(row.gguf for row in KNOWN))
        raise UnknownKindError(f"the architecture `{name}` is not known here", f"known ones: {known}; {_ELSEWHERE}")
    return row


def _full(row: Architecture, key: str) -> str:
    return key if key.startswith("tokenizer.") else f"{row.gguf}.{key}"
