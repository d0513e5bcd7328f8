"""Models that llama.cpp would load and compute differently, because its graph of the architecture has other settings built in."""

from __future__ import annotations

from typing import Any

from fewbits.model.gguf.architectures import rotary
from fewbits.model.gguf.architectures.table import KNOWN, Architecture, attribute, of


def unsupported(config: Any) -> str | None:
    """Why llama.cpp would not compute what this model computes; None: it would."""
    model_type = getattr(config, "model_type", None)
    if model_type not in {row.model_type for row in KNOWN}:
        return f"the architecture `{model_type}` is not known here (known: {', '.join(row.model_type for row in KNOWN)})"
    row = of(config)
    return (
        _head(config, row)
        or _granted(config, row)
        or _activation(config, row)
        or _layers(config, row)
        or (rotary.unsupported(config) if row.rotary else None)
    )


def _head(config: Any, row: Architecture) -> str | None:
    """A classifier on top of a known model is another model."""
    import transformers

    named = [name for name in config.architectures or [] if hasattr(transformers, name)]
    if named and row.class_name not in named:
        return f"llama.cpp's {row.gguf} computes what {row.class_name} does, the model is a {named[0]}"
    return None


def _granted(config: Any, row: Architecture) -> str | None:
    for name, value in row.granted.items():
        setting = getattr(config, name, value)
        if (setting or None) != (value or None):  # absent, false and empty mean the same
            return f"llama.cpp's {row.gguf} has `{name} = {value}` built in, the model has {setting}"
    return None


def _activation(config: Any, row: Architecture) -> str | None:
    act = getattr(config, row.activation_key)
    return None if act in row.activations else f"llama.cpp's {row.gguf} computes {row.activations[0]}, the model {act}"


def _layers(config: Any, row: Architecture) -> str | None:
    count = int(config.num_hidden_layers)
    if row.windows:
        usual = ["full_attention" if (i + 1) % row.windows == 0 else "sliding_attention" for i in range(count)]
        if list(config.layer_types) != usual:
            return f"llama.cpp's {row.gguf} gives every {row.windows}th layer full attention, the model other ones"
        if not config.sliding_window:
            return f"llama.cpp's {row.gguf} needs a sliding window, the model has none"
    if row.scale and config.query_pre_attn_scalar != row.scale(config):
        square = config.query_pre_attn_scalar
        at = f"1 / sqrt({row.scale(config):g}) at {count} layers"
        return f"llama.cpp's {row.gguf} scales attention by {at}, the model by 1 / sqrt({square})"
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if row.gguf == "gemma2" and not getattr(config, name):
            return f"llama.cpp's gemma2 always caps logits, the model has `{name} = None`"
    rotated = getattr(config, "no_rope_layers", None)
    if rotated is not None and list(rotated[:count]) != [int((i + 1) % 4 != 0) for i in range(count)]:
        return f"llama.cpp's {row.gguf} leaves every 4th layer without rotation, the model other ones"
    if row.gguf in {"phi3", "qwen2moe"} and attribute(config, "head_dim") * config.num_attention_heads != config.hidden_size:
        return f"llama.cpp's {row.gguf} has heads that add up to the hidden size, the model's do not"
    return None
