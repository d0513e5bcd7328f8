"""The decoders that can be written: the differences between families like Llama, and a model's sizes.

Biases and norms of heads are recognised by a model's tensors; a row of `KNOWN` has only what tensors do not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SILU = ("silu", "swish")
_TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")  # one curve, three spellings
_ROPES = ("default", "linear", "llama3", "yarn")  # those whose tables do not depend on the length of the sequence
_ATTENTIONS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class Norms:
    """Names of a layer's norms. An `after_` norm is of the output of attention or MLP, before it is added."""

    before_attention: str = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str | None = None


_SANDWICH = Norms(
    after_attention="post_attention_layernorm", before_mlp="pre_feedforward_layernorm", after_mlp="post_feedforward_layernorm"
)


@dataclass(frozen=True, kw_only=True)
class Family:
    model_type: str  # of transformers, and of onnxruntime-genai, which uses the same words
    norms: Norms = Norms()
    norm_offset: float = 0.0  # Gemma stores the distance of a norm's weight from 1
    scaled_embedding: bool = False  # by the square root of its width
    activation: str = "silu"
    activation_key: str = "hidden_act"  # the attribute of the config that names it
    own_scale: bool = False  # queries are scaled by `query_pre_attn_scalar`, not by the width of a head


_GEMMA: dict[str, Any] = {"norm_offset": 1.0, "scaled_embedding": True, "activation": "gelu"}
_GEMMA2: dict[str, Any] = {**_GEMMA, "norms": _SANDWICH, "own_scale": True, "activation_key": "hidden_activation"}
KNOWN = (
    Family(model_type="llama"),
    Family(model_type="mistral"),
    Family(model_type="qwen2"),
    Family(model_type="qwen3"),
    Family(model_type="phi3"),
    Family(model_type="smollm3"),
    Family(model_type="gemma", **_GEMMA),
    Family(model_type="gemma2", **_GEMMA2),
    Family(model_type="gemma3_text", **_GEMMA2),
)


@dataclass(frozen=True)
class Decoder:
    """A model's sizes."""

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context: int
    epsilon: float
    scale: float  # of queries times keys
    windows: tuple[int, ...]  # of each layer: positions that attention sees; -1: all
    ropes: tuple[str | None, ...]  # of each layer: the type of attention whose rotary tables it has, empty for those of all; None: none
    attention_softcap: float
    logit_softcap: float

    @property
    def tables(self) -> tuple[str, ...]:
        """The rotary tables that some layer needs, each once."""
        return tuple(dict.fromkeys(kind for kind in self.ropes if kind is not None))


def of(config: Any) -> Decoder:
    """Of a config that `unsupported` let through."""
    family = next(row for row in KNOWN if row.model_type == config.model_type)
    heads, layers = int(config.num_attention_heads), int(config.num_hidden_layers)
    head_size = _head_size(config)
    types = getattr(config, "layer_types", None) or [_ATTENTIONS[bool(getattr(config, "sliding_window", None))]] * layers
    own_ropes = set(_ropes(config)) == set(_ATTENTIONS)
    rotated = getattr(config, "no_rope_layers", None) or [1] * layers  # SmolLM3's list says 1 where there IS a rotation
    return Decoder(
        family=family,
        layers=layers,
        hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_size=head_size,
        vocabulary=int(config.vocab_size),
        context=int(config.max_position_embeddings),
        epsilon=float(config.rms_norm_eps),
        scale=float(config.query_pre_attn_scalar if family.own_scale else head_size) ** -0.5,
        windows=tuple(int(config.sliding_window) if kind == "sliding_attention" else -1 for kind in types),
        ropes=tuple((kind if own_ropes else "") if turns else None for kind, turns in zip(types, rotated, strict=True)),
        attention_softcap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
        logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
    )


def unsupported(config: Any) -> str | None:
    """Why this model cannot be written as such a graph; None if it can."""
    model_type = getattr(config, "model_type", None)
    family = next((row for row in KNOWN if row.model_type == model_type), None)
    if family is None:
        known = ", ".join(row.model_type for row in KNOWN)
        return f"the architecture `{model_type}` has no graph with a KV cache here (known: {known})"
    activation = getattr(config, family.activation_key)
    if activation not in (_SILU if family.activation == "silu" else _TANH_GELU):
        return f"its activation is {activation}; the graph of {model_type} has {family.activation}"
    if strange := set(getattr(config, "layer_types", None) or ()) - set(_ATTENTIONS):
        return f"it has layers of {', '.join(sorted(strange))}"
    if getattr(config, "use_bidirectional_attention", None):
        return "its attention sees later tokens, and a KV cache has none of them"
    if (width := _head_size(config)) % 16:
        return f"its heads are {width} wide; ONNX Runtime's attention rotates heads whose width is a multiple of 16"
    for rope in _ropes(config).values():
        if (kind := rope.get("rope_type", "default")) not in _ROPES:
            return f"its rotary scaling `{kind}` changes with the length of the text; the graph has one table for all lengths"
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            return "only a part of each head is rotated, which this writer does not know"
    return None


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _ropes(config: Any) -> dict[str, Mapping[str, Any]]:
    """Rotary parameters by the type of attention; under `` if all share them."""
    rope: Mapping[str, Any] = config.rope_parameters
    return {kind: rope[kind] for kind in _ATTENTIONS if kind in rope} or {"": rope}
