"""The sizes of a model of any architecture, from the metadata of its GGUF: for memory, context and vocabulary, not to build a module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fewbits.model import limits

_KEYS = {  # of a config -> of a file, after the name of the architecture
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "sliding_window": "attention.sliding_window",
}


def config_of(fields: Mapping[str, Any], tensors: int, path: Path) -> Any:
    """A transformers config without a class. `tensors`: how many the file has, for limits on what it may say."""
    from transformers import PretrainedConfig

    architecture = str(fields.get("general.architecture", ""))
    described = {name: value for name, value in fields.items() if name.startswith(f"{architecture}.")}
    limits.check(described, tensors, path)
    said = {name: _largest(described.get(f"{architecture}.{key}")) for name, key in _KEYS.items()}
    known = {name: value for name, value in said.items() if value}  # a model without attention says that it has 0 heads
    tokens = fields.get("tokenizer.ggml.tokens")
    known.setdefault("vocab_size", len(tokens) if isinstance(tokens, list) else 0)
    if "head_dim" not in known and known.get("num_attention_heads"):
        known["head_dim"] = known.get("hidden_size", 0) // known["num_attention_heads"]
    config = PretrainedConfig(**known)
    encodes = described.get(f"{architecture}.attention.causal") is False
    config.architectures = [f"{architecture.title()}{'Model' if encodes else 'ForCausalLM'}"]
    config.model_type = architecture
    return config


def _largest(value: Any) -> int | None:
    """Some sizes differ from layer to layer: the file then has one for each."""
    sizes = [size for size in (value if isinstance(value, list) else [value]) if isinstance(size, int) and not isinstance(size, bool)]
    return max(sizes, default=None)
