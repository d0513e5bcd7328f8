"""The architectures that llama.cpp and transformers share, one entry each, used for writing files and for reading them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fewbits.errors import UnknownKindError

Value = int | float | str | bool

_SHAPE = {  # metadata key -> attribute of the config
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "vocab_size": "vocab_size",
}
_ROTARY = {
    **_SHAPE,
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "rotary_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_SMALL_EXPERTS = {**_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"}
_WINDOW = {"attention.sliding_window": "sliding_window", "final_logit_softcapping": "final_logit_softcapping"}
_SILU = ("silu", "swish")
_TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")  # one curve, three spellings
_GEMMA = {"use_bidirectional_attention": None, "attention_bias": False}
_EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": []}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    model_type: str  # of transformers
    class_name: str
    gguf: str  # llama.cpp's name
    keys: Mapping[str, str]
    constants: Mapping[str, Value] = field(default_factory=dict)  # keys with the same value for every model
    activations: tuple[str, ...] = _SILU
    activation_key: str = "hidden_act"
    rotary: bool = True
    scalings: frozenset[str] = frozenset({"default", "linear", "yarn"})  # of the rotary frequencies
    partial: bool = False  # whether a part of each head may be left unrotated
    interleaved: bool = False  # llama.cpp rotates neighbouring rows, transformers row i with row i + head_dim / 2
    unit_norms: bool = False  # transformers multiplies by 1 + weight, llama.cpp by the value in the file
    windows: int = 0  # every so many layers one has full attention, the others a sliding window; 0: llama.cpp has no window here
    names: Mapping[str, str] = field(default_factory=dict)  # module -> llama.cpp's name, where the gguf package does not have it
    granted: Mapping[str, Any] = field(default_factory=dict)  # attribute -> the value that is built into llama.cpp's graph
    scale: Callable[[Any], float] | None = None  # square of llama.cpp's divisor of attention scores; None: as in transformers


def _square_of_scale(layers_of_largest: int) -> Callable[[Any], float]:
    """For Gemma, where llama.cpp decides by the number of layers: the largest model has another divisor than the rest."""

    def scale(config: Any) -> float:
        if config.num_hidden_layers == layers_of_largest:
            return float(config.hidden_size // config.num_attention_heads)
        return float(config.head_dim)

    return scale


_WITH_FACTORS = frozenset({"default", "linear", "yarn", "llama3"})

KNOWN = [
    Architecture(model_type="llama", class_name="LlamaForCausalLM", gguf="llama", keys=_ROTARY, interleaved=True, scalings=_WITH_FACTORS),
    Architecture(
        model_type="mistral", class_name="MistralForCausalLM", gguf="llama", keys=_ROTARY, interleaved=True, scalings=_WITH_FACTORS
    ),
    Architecture(
        model_type="mixtral",
        class_name="MixtralForCausalLM",
        gguf="llama",
        keys={**_ROTARY, **_EXPERTS},
        interleaved=True,
        scalings=_WITH_FACTORS,
    ),
    Architecture(
        model_type="smollm3",
        class_name="SmolLM3ForCausalLM",
        gguf="smollm3",
        keys=_ROTARY,
        interleaved=True,
        granted={"attention_bias": False, "mlp_bias": False, "no_rope_layer_interval": 4},
    ),
    Architecture(model_type="qwen2", class_name="Qwen2ForCausalLM", gguf="qwen2", keys=_ROTARY),
    Architecture(model_type="qwen3", class_name="Qwen3ForCausalLM", gguf="qwen3", keys=_ROTARY, granted={"attention_bias": False}),
    Architecture(
        model_type="qwen2_moe",
        class_name="Qwen2MoeForCausalLM",
        gguf="qwen2moe",
        keys={**_ROTARY, **_SMALL_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        granted={**_EVERY_LAYER, "norm_topk_prob": False, "tie_word_embeddings": False},
    ),
    Architecture(
        model_type="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        gguf="qwen3moe",
        keys={**_ROTARY, **_SMALL_EXPERTS},
        granted={**_EVERY_LAYER, "norm_topk_prob": True, "attention_bias": False},
    ),
    Architecture(
        model_type="gemma2",
        class_name="Gemma2ForCausalLM",
        gguf="gemma2",
        keys={**_ROTARY, **_WINDOW, "attn_logit_softcapping": "attn_logit_softcapping"},
        activations=_TANH_GELU,
        activation_key="hidden_activation",
        unit_norms=True,
        windows=2,
        granted={**_GEMMA, "tie_word_embeddings": True},
        scale=_square_of_scale(46),
    ),
    Architecture(
        model_type="gemma3_text",
        class_name="Gemma3ForCausalLM",
        gguf="gemma3",
        keys={**_ROTARY, **_WINDOW},
        activations=_TANH_GELU,
        activation_key="hidden_activation",
        scalings=frozenset({"default", "linear"}),
        unit_norms=True,
        windows=6,
        granted={**_GEMMA, "attn_logit_softcapping": None},
        scale=_square_of_scale(62),
    ),
    Architecture(
        model_type="phi3",
        class_name="Phi3ForCausalLM",
        gguf="phi3",
        keys=_ROTARY,
        scalings=frozenset({"default", "longrope"}),
        partial=True,
    ),
    Architecture(
        model_type="gpt2",
        class_name="GPT2LMHeadModel",
        gguf="gpt2",
        keys={**_SHAPE, "feed_forward_length": "n_inner", "attention.layer_norm_epsilon": "layer_norm_epsilon"},
        activations=_TANH_GELU,
        activation_key="activation_function",
        rotary=False,
        granted={"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True},
    ),
    Architecture(  # an encoder for embeddings. llama.cpp's gelu is the tanh curve, which differs from gelu by 0.0005 at most
        model_type="bert",
        class_name="BertModel",
        gguf="bert",
        keys={**_SHAPE, "attention.layer_norm_epsilon": "layer_norm_eps", "tokenizer.ggml.token_type_count": "type_vocab_size"},
        constants={"attention.causal": False},
        activations=("gelu", *_TANH_GELU),
        rotary=False,
        names={"pooler.dense": "cls"},
        granted={"is_decoder": False, "add_cross_attention": False},
    ),
]


def of(config: Any) -> Architecture:
    row = next((row for row in KNOWN if row.model_type == config.model_type), None)
    if row is None:
        known = ", ".join(row.model_type for row in KNOWN)
        raise UnknownKindError(f"llama.cpp's names for the architecture `{config.model_type}` are not known here", f"known: {known}")
    return row


def attribute(config: Any, name: str) -> Any:
    """An attribute of a config, or what transformers computes where the config leaves it out. None: the model has no such setting."""
    value = getattr(config, name, None)
    if value is not None:
        return value
    match name:
        case "head_dim":
            return config.hidden_size // config.num_attention_heads
        case "rotary_dim":
            whole = attribute(config, "head_dim")
            parts = config.rope_parameters.get("partial_rotary_factor", 1.0) if of(config).partial else 1.0
            return int(whole * parts)
        case "n_inner":
            return 4 * config.hidden_size
        case "num_key_value_heads":
            return config.num_attention_heads
    return None
