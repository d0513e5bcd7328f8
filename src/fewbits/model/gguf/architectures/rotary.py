"""Rotary frequencies in a file: keys for those that are computed, tensors for those that are listed (Llama 3's factors, Phi-3's lists)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError
from fewbits.model.gguf.architectures.numbers import tidy
from fewbits.model.gguf.architectures.table import Architecture, Value, attribute, of

if TYPE_CHECKING:
    from torch import Tensor

_FACTORS_AGREE = 1e-4  # relative: the file has them in float32
_LLAMA3, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (_LLAMA3, _LONG, _SHORT)  # tensors that are not parameters of the module
_YARN = {"rope.scaling.yarn_beta_fast": ("beta_fast", 32.0), "rope.scaling.yarn_beta_slow": ("beta_slow", 1.0)}
_ORIGINAL, _ATTENTION = "rope.scaling.original_context_length", "rope.scaling.attn_factor"
_LOCAL_THETA = 10_000.0  # of Gemma 3's layers with a sliding window, where a file does not say


def rotations(config: Any) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Rotary parameters of the layers with full attention, and of those with a sliding window where they differ."""
    rope = config.rope_parameters
    return (rope["full_attention"], rope["sliding_attention"]) if "full_attention" in rope else (rope, None)


def unsupported(config: Any) -> str | None:
    row, (rope, local) = of(config), rotations(config)
    kind = rope.get("rope_type", "default")
    if kind not in row.scalings:
        return f"llama.cpp's {row.gguf} has no rotary scaling of type `{kind}`"
    if local is not None and local.get("rope_type", "default") != "default":
        return f"llama.cpp's {row.gguf} scales no rotation of the layers with a window"
    if rope.get("partial_rotary_factor", 1.0) != 1.0 and not row.partial:
        return "only a part of each head is rotated, which this writer does not know"
    if kind == "yarn":
        wanted, usual = rope.get("attention_factor"), 0.1 * math.log(rope["factor"]) + 1
        if rope.get("mscale") or rope.get("mscale_all_dim") or not rope.get("truncate", True) or not math.isclose(wanted or usual, usual):
            return "its yarn scaling differs from the usual one, which is all that llama.cpp computes"
    return None


def metadata(config: Any) -> dict[str, Value]:
    rope, local = rotations(config)
    kind = rope.get("rope_type", "default")
    values: dict[str, Value] = {"rope.freq_base": float(rope["rope_theta"])}
    if local is not None:
        values["rope.freq_base_swa"] = float(local["rope_theta"])
    if kind in {"linear", "yarn"}:
        values["rope.scaling.type"] = str(kind)
        values["rope.scaling.factor"] = float(rope["factor"])
    if kind in {"yarn", "longrope"}:
        values[_ORIGINAL] = int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    if kind == "yarn":
        values |= {key: float(rope.get(name) or default) for key, (name, default) in _YARN.items()}
    if kind == "longrope":
        values[_ATTENTION] = _scaled(config)[1]
    return values


def factors(config: Any) -> dict[str, Tensor]:
    """(rotated columns / 2,) float32 each, by the name of their tensor: what the frequencies are divided by."""
    import torch

    if not of(config).rotary:
        return {}
    rope, _ = rotations(config)
    if rope.get("rope_type") == "longrope":
        return {_LONG: torch.tensor(rope["long_factor"]).float(), _SHORT: torch.tensor(rope["short_factor"]).float()}
    if rope.get("rope_type") != "llama3":
        return {}
    half = int(attribute(config, "head_dim")) // 2
    plain = float(rope["rope_theta"]) ** (-torch.arange(half, dtype=torch.float64) / half)
    return {_LLAMA3: (plain / _scaled(config)[0].double()).float()}


def _scaled(config: Any) -> tuple[Tensor, float]:
    """transformers' frequencies, and the factor that it multiplies sines and cosines by."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, attention = ROPE_INIT_FUNCTIONS[rotations(config)[0]["rope_type"]](config, torch.device("cpu"))
    return frequencies, float(attention)


def parameters_of(row: Architecture, fields: Mapping[str, Any], settings: Mapping[str, Any], held: Mapping[str, list[float]]) -> Any:
    """transformers' rope_parameters for a file with these keys. `held`: its factors, by the name of their tensor."""
    context = int(settings["max_position_embeddings"])
    kind = fields.get("rope.scaling.type") or "default"
    rope: dict[str, Any] = {"rope_type": kind if kind != "none" else "default", "rope_theta": tidy(fields.get("rope.freq_base") or 10000.0)}
    if rope["rope_type"] in {"linear", "yarn"}:
        rope["factor"] = tidy(fields.get("rope.scaling.factor") or 1.0)
    if rope["rope_type"] == "yarn":
        rope["original_max_position_embeddings"] = int(fields.get(_ORIGINAL) or context)
        rope |= {name: tidy(fields[key]) for key, (name, _) in _YARN.items() if fields.get(key) is not None}
    if _LONG in held:
        lists = {"long_factor": held[_LONG], "short_factor": held[_SHORT]}
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": int(fields.get(_ORIGINAL) or context)}
        rope |= {name: [tidy(value) for value in values] for name, values in lists.items()}
        rope["attention_factor"] = tidy(fields.get(_ATTENTION) or 1.0)
    if row.partial and (rotated := fields.get("rope.dimension_count")):
        rope["partial_rotary_factor"] = int(rotated) / int(head_width(settings))
    if row.windows and row.model_type == "gemma3_text":
        return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": _local_theta(fields)}}
    return rope


def head_width(settings: Mapping[str, Any]) -> int:
    """Columns of an attention head."""
    return int(settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"])


def _local_theta(fields: Mapping[str, Any]) -> float:
    return float(tidy(fields.get("rope.freq_base_swa") or _LOCAL_THETA))


def with_llama3(config: Any, settings: Mapping[str, Any], held: list[float]) -> Any:
    """The file has the factors and not the parameters behind them: try those of every Llama 3, and any power of
    two for the length before scaling; accept them only if the factors fit."""
    import torch

    llama3 = {"rope_type": "llama3", "factor": tidy(held[-1]), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    best: tuple[float, Any] = (_FACTORS_AGREE, None)
    for original in dict.fromkeys((8192, settings["max_position_embeddings"], *(1 << power for power in range(8, 21)))):
        if original > max(8192, settings["max_position_embeddings"]):
            continue
        rope = {**settings["rope_parameters"], **llama3, "original_max_position_embeddings": original}
        candidate = type(config)(**{**settings, "rope_parameters": rope})
        computed = factors(candidate)[_LLAMA3]
        if len(computed) == len(held):
            away = float((computed / torch.tensor(held) - 1).abs().max())
            best = min(best, (away, candidate), key=lambda each: each[0])
    if best[1] is not None:
        return best[1]
    raise InputError(f"`{_LLAMA3}` holds factors that no known rotary scaling gives", "open the original checkpoint instead")
