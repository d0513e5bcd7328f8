"""How llama.cpp sees a transformers architecture: its name there, its metadata, the order of its rows.

One row of `KNOWN` per architecture, read in both directions: config -> metadata to write a GGUF, metadata -> config to
open one. The names of tensors come from the gguf package; `row_order` is the only thing done to their content.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

Value = int | float | str

_SHAPE = {  # metadata key -> attribute of the config
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "vocab_size": "vocab_size",
}
_ROTARY = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_YARN = {"rope.scaling.yarn_beta_fast": ("beta_fast", 32.0), "rope.scaling.yarn_beta_slow": ("beta_slow", 1.0)}
_SILU = ("silu", "swish")
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # one curve, three spellings
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3 divides each frequency by its own factor, kept as a tensor


@dataclass(frozen=True, kw_only=True)
class Architecture:
    model_type: str  # of transformers
    class_name: str
    gguf: str  # llama.cpp's name
    keys: Mapping[str, str]
    activations: tuple[str, ...] = _SILU
    rotary: bool = True
    interleaved: bool = False  # llama.cpp rotates neighbouring rows, transformers row i with row i + head_dim / 2
    refuses: Mapping[str, Any] | None = None  # attribute -> the value that llama.cpp's graph has no place for

    @cached_property
    def activation_key(self) -> str:
        return "hidden_act" if self.rotary else "activation_function"


KNOWN = [
    Architecture(model_type="llama", class_name="LlamaForCausalLM", gguf="llama", keys={**_SHAPE, **_ROTARY, **_RMS}, interleaved=True),
    Architecture(model_type="mistral", class_name="MistralForCausalLM", gguf="llama", keys={**_SHAPE, **_ROTARY, **_RMS}, interleaved=True),
    Architecture(model_type="qwen2", class_name="Qwen2ForCausalLM", gguf="qwen2", keys={**_SHAPE, **_ROTARY, **_RMS}),
    Architecture(
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        gguf="qwen3",
        keys={**_SHAPE, **_ROTARY, **_RMS},
        refuses={"attention_bias": True},
    ),
    Architecture(
        model_type="gpt2",
        class_name="GPT2LMHeadModel",
        gguf="gpt2",
        keys={**_SHAPE, "feed_forward_length": "n_inner", "attention.layer_norm_epsilon": "layer_norm_epsilon"},
        activations=_TANH_GELU,
        rotary=False,
        refuses={"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
    ),
]


def of(config: Any) -> Architecture:
    """The row of a config that `unsupported` let through."""
    return next(row for row in KNOWN if row.model_type == config.model_type)


def unsupported(config: Any) -> str | None:
    """Why llama.cpp would not compute what this model computes; None if it would."""
    model_type = getattr(config, "model_type", None)
    if model_type not in {row.model_type for row in KNOWN}:
        return f"the architecture `{model_type}` is not known here (known: {', '.join(row.model_type for row in KNOWN)})"
    row = of(config)
    for attribute, value in (row.refuses or {}).items():
        if getattr(config, attribute, None) == value:
            return f"llama.cpp's {row.gguf} has no `{attribute} = {value}`"
    if (act := getattr(config, row.activation_key)) not in row.activations:
        return f"llama.cpp's {row.gguf} computes {row.activations[0]}, the model {act}"
    return _rope_unsupported(config.rope_parameters) if row.rotary else None


def _rope_unsupported(rope: Mapping[str, Any]) -> str | None:
    kind = rope.get("rope_type", "default")
    if kind not in {"default", "linear", "yarn", "llama3"}:
        return f"llama.cpp has no rotary scaling of type `{kind}`"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "only a part of each head is rotated, which this writer does not know"
    if kind == "yarn":
        wanted, usual = rope.get("attention_factor"), 0.1 * math.log(rope["factor"]) + 1
        if rope.get("mscale") or rope.get("mscale_all_dim") or not rope.get("truncate", True) or not math.isclose(wanted or usual, usual):
            return "its yarn scaling differs from the usual one, which is all that llama.cpp computes"
    return None


def metadata(config: Any) -> dict[str, Value]:
    """Every `{architecture}.*` key that llama.cpp needs, in a fixed order."""
    row = of(config)
    values: dict[str, Value] = {key: _attribute(config, name) for key, name in row.keys.items()}
    window = getattr(config, "sliding_window", None)
    if window:  # llama.cpp attends to everything: up to the window's length that is the same function
        values["context_length"] = min(int(values["context_length"]), int(window))
    if row.rotary:
        rope = config.rope_parameters
        values["rope.freq_base"] = float(rope["rope_theta"])
        kind = rope.get("rope_type", "default")
        if kind in {"linear", "yarn"}:
            values["rope.scaling.type"] = str(kind)
            values["rope.scaling.factor"] = float(rope["factor"])
        if kind == "yarn":
            values["rope.scaling.original_context_length"] = int(
                rope.get("original_max_position_embeddings") or config.max_position_embeddings
            )
            values |= {key: float(rope.get(name) or default) for key, (name, default) in _YARN.items()}
    return {f"{row.gguf}.{key}": value for key, value in values.items()}


def _attribute(config: Any, name: str) -> int | float:
    value: int | float | None = getattr(config, name, None)
    if value is None and name == "head_dim":
        return int(config.hidden_size // config.num_attention_heads)
    if value is None and name == "n_inner":
        return int(4 * config.hidden_size)
    if value is None and name == "num_key_value_heads":
        return int(config.num_attention_heads)
    assert value is not None, name
    return value


def rope_factors(config: Any) -> Tensor | None:
    """(head_dim / 2,) float32: what Llama 3 divides the frequencies by; None for every other scaling."""
    row = of(config)
    if not row.rotary or config.rope_parameters.get("rope_type") != "llama3":
        return None
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    half = int(_attribute(config, "head_dim")) // 2
    plain = float(config.rope_parameters["rope_theta"]) ** (-torch.arange(half, dtype=torch.float64) / half)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors: Tensor = (plain / scaled.double()).float()
    return factors


def row_order(config: Any, name: str) -> list[int] | None:
    """Row i of a GGUF tensor is row `order[i]` of the transformers one; None where they agree."""
    asked = re.search(r"\.self_attn\.([qk])_proj(\.|$)", name)
    if not of(config).interleaved or not asked:
        return None
    heads = int(_attribute(config, "num_attention_heads" if asked[1] == "q" else "num_key_value_heads"))
    width = int(_attribute(config, "head_dim"))
    return [head * width + pair + half for head in range(heads) for pair in range(width // 2) for half in (0, width // 2)]


def tensor_names(config: Any) -> Callable[[str], str]:
    """From `model.layers.0.mlp.up_proj.weight` to `blk.0.ffn_up.weight`."""
    import gguf

    arch = next(member for member, name in gguf.MODEL_ARCH_NAMES.items() if name == of(config).gguf)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)

    def rename(name: str) -> str:
        found: str | None = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise InputError(f"`{name}` has no place in llama.cpp's {of(config).gguf}", "choose another target")
        return found

    return rename


def config_of(fields: Mapping[str, Any], tensors: Collection[str], factors: list[float] | None) -> Any:
    """The transformers config that a GGUF's metadata describes. `factors`: its `rope_freqs`, if it has them."""
    import transformers

    name = fields.get("general.architecture")
    row = next((row for row in KNOWN if row.gguf == name), None)
    if row is None:
        known = ", ".join(dict.fromkeys(row.gguf for row in KNOWN))
        raise InputError(f"the architecture `{name}` is not known here", f"known ones: {known}; open the original checkpoint instead")
    found = {key: _tidy(fields[f"{name}.{key}"]) for key in row.keys if f"{name}.{key}" in fields}
    found.setdefault("vocab_size", len(fields.get("tokenizer.ggml.tokens", ())))
    settings: dict[str, Any] = {attribute: found[key] for key, attribute in row.keys.items() if key in found}
    if row.rotary:
        settings.setdefault("num_key_value_heads", settings["num_attention_heads"])
        settings.setdefault("head_dim", settings["hidden_size"] // settings["num_attention_heads"])
        settings["rope_parameters"] = _rope_of(
            {key: fields.get(f"{name}.{key}") for key in _ROPE_KEYS}, settings["max_position_embeddings"]
        )
        if row.model_type == "llama":
            settings |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        settings[f"{role}_token_id"] = fields.get(f"tokenizer.ggml.{key}_token_id")
    settings["tie_word_embeddings"] = "output.weight" not in tensors
    settings["architectures"] = [row.class_name]
    config_class = getattr(transformers, row.class_name).config_class
    config = config_class(**settings)
    return config if factors is None else _with_llama3_rope(config, settings, factors)


_ROPE_KEYS = ("rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", *_YARN)


def _rope_of(fields: Mapping[str, Any], context: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": fields["rope.scaling.type"] or "default", "rope_theta": _tidy(fields["rope.freq_base"] or 10000.0)}
    if rope["rope_type"] == "none":
        rope["rope_type"] = "default"
    if rope["rope_type"] in {"linear", "yarn"}:
        rope["factor"] = _tidy(fields["rope.scaling.factor"] or 1.0)
    if rope["rope_type"] == "yarn":
        rope["original_max_position_embeddings"] = int(fields["rope.scaling.original_context_length"] or context)
        rope |= {name: _tidy(fields[key]) for key, (name, _) in _YARN.items() if fields[key] is not None}
    return rope


def _with_llama3_rope(config: Any, settings: dict[str, Any], factors: list[float]) -> Any:
    """The file has the factors, not what they came from: try the parameters of every Llama 3, and take them only if they fit."""
    import torch

    own = {"rope_type": "llama3", "factor": _tidy(max(factors)), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for original in (8192, settings["max_position_embeddings"]):
        rope = {**settings["rope_parameters"], **own, "original_max_position_embeddings": original}
        candidate = type(config)(**{**settings, "rope_parameters": rope})
        computed = rope_factors(candidate)
        if computed is not None and len(computed) == len(factors) and torch.allclose(computed, torch.tensor(factors), rtol=1e-4):
            return candidate
    raise InputError(f"`{ROPE_FACTORS}` holds factors that no known rotary scaling gives", "open the original checkpoint instead")


def _tidy(value: Any) -> Any:
    """A float32 as a person would write it: 1e-05, not 9.999999747378752e-06."""
    if not isinstance(value, float):
        return value
    return next(short for digits in range(1, 18) if _same_float32(short := float(f"{value:.{digits}g}"), value))


def _same_float32(a: float, b: float) -> bool:
    import struct

    return struct.pack("f", a) == struct.pack("f", b)
