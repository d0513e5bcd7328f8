"""The settings of a config.json's text model, read without transformers, with the defaults that transformers would fill in.

Files leave out what equals the default of their family. The defaults below are those of transformers 5 for the settings that sizes depend
on; a test compares every one with AutoConfig. A config of another family must have all settings that are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from fewbits.errors import InputError

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_NUMBERS = (
    "intermediate_size", "max_position_embeddings", "num_key_value_heads", "head_dim", "n_inner", "sliding_window",
    "sliding_window_pattern", "max_window_layers", "attention_chunk_size", "num_local_experts", "num_experts", "n_routed_experts",
    "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts", "first_k_dense_replace",
    "decoder_sparse_step",
)  # fmt: skip
_LARGEST = 1 << 40
_OTHER_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
_SIZES = (*_NEEDED, "intermediate_size", "max_position_embeddings", "tie_word_embeddings")
_OF_A_PICTURE_MODEL = {"gemma3": "gemma3_text", "mistral3": "mistral", "llava": "llama", "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2"}

# defaults in the order of _SIZES, then further ones of the family
_FAMILIES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "llama": ((4096, 32, 32, 32000, 11008, 2048, False), {"attention_bias": False, "mlp_bias": False}),
    "mistral": ((4096, 32, 32, 32000, 14336, 131072, False), {"num_key_value_heads": 8, "sliding_window": 4096}),
    "mixtral": ((4096, 32, 32, 32000, 14336, 131072, False), {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "smollm3": ((2048, 36, 16, 128256, 11008, 32768, True), {"num_key_value_heads": 4, "use_sliding_window": False}),
    "qwen2": (
        (4096, 32, 32, 151936, 22016, 32768, False),
        {"num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096},
    ),
    "qwen3": (
        (4096, 32, 32, 151936, 22016, 32768, False),
        {"num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False, "sliding_window": 4096},
    ),
    "qwen2_moe": (
        (2048, 24, 16, 151936, 5632, 32768, False),
        {
            "num_key_value_heads": 16, "use_sliding_window": False, "sliding_window": 4096, "qkv_bias": True, "num_experts": 60,
            "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3_moe": (
        (2048, 24, 32, 151936, 6144, 32768, False),
        {
            "num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": 4096, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "gemma": ((3072, 28, 16, 256000, 24576, 8192, True), {"num_key_value_heads": 16, "head_dim": 256}),
    "gemma2": ((2304, 26, 8, 256000, 9216, 8192, True), {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}),
    "gemma3_text": ((2304, 26, 8, 262208, 9216, 131072, True), {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}),
    "phi": ((2048, 24, 32, 51200, 8192, 2048, False), {}),
    "phi3": ((3072, 32, 32, 32064, 8192, 4096, False), {}),
    "gpt2": ((768, 12, 12, 50257, None, 1024, True), {}),
    "gpt_neox": ((6144, 44, 64, 50432, 24576, 2048, False), {}),
    "starcoder2": ((3072, 30, 24, 49152, 12288, 4096, True), {"num_key_value_heads": 2}),
    "nemotron": ((6144, 32, 48, 256000, 24576, 4096, False), {}),
    "olmo2": ((4096, 32, 32, 50304, 11008, 2048, False), {}),
    "granite": ((4096, 32, 32, 32000, 11008, 2048, False), {}),
    "gpt_oss": (
        (2880, 36, 64, 201088, 2880, 131072, False),
        {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4},
    ),
    "glm4_moe": (
        (4096, 46, 96, 151552, 10944, 131072, False),
        {
            "num_key_value_heads": 8, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
        },
    ),
}  # fmt: skip

# every so many layers one attends to all tokens, the others to the window
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}


def known() -> tuple[str, ...]:
    return tuple(_FAMILIES)


def of(content: Mapping[str, Any]) -> Any:
    """An object with the attributes that a transformers config would have, for `footprint.shape` and the tables of llama.cpp."""
    text = content.get("text_config")
    if isinstance(text, Mapping):
        family = _OF_A_PICTURE_MODEL.get(str(content.get("model_type")), content.get("model_type"))
        content = {"model_type": family, "tie_word_embeddings": content.get("tie_word_embeddings"), **text}
        content = {key: value for key, value in content.items() if value is not None}
    family = str(content.get("model_type", ""))
    if not family:
        raise InputError("the config names no model_type", "it should be the config.json of a transformers model")
    sizes, more = _FAMILIES.get(family, ((), {}))
    defaults = dict(zip(_SIZES, sizes, strict=False)) | more
    said = {_OTHER_NAMES.get(key, key): value for key, value in content.items()}
    settings = {"tie_word_embeddings": False} | defaults | said
    if missing := next((key for key in _NEEDED if settings.get(key) is None), None):
        raise InputError(f"the config of this `{family}` does not say `{missing}`", "is it the config.json of a language model?")
    if wrong := next((key for key in (*_NEEDED, *_NUMBERS) if not _is_size(settings.get(key), key in _NEEDED)), None):
        raise InputError(f"the config says that `{wrong}` is {settings[wrong]!r}", "the file is damaged; fetch it again")
    if not settings.get("layer_types"):
        settings.pop("layer_types", None)
        if kinds := _layer_types(family, settings):
            settings["layer_types"] = kinds
    return SimpleNamespace(**settings)


def _is_size(value: Any, needed: bool) -> bool:
    if value is None:
        return not needed
    return isinstance(value, int) and not isinstance(value, bool) and int(needed) <= value < _LARGEST


def _layer_types(family: str, settings: Mapping[str, Any]) -> list[str] | None:
    """As transformers fills them in. None: the family has none, and its window holds for all layers."""
    layers, window = int(settings["num_hidden_layers"]), settings.get("sliding_window")
    if every := _FULL_EVERY.get(family):
        every = int(settings.get("sliding_window_pattern") or every)
        return ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(layers)]
    if family in ("qwen2", "qwen3", "qwen2_moe"):
        first = int(settings.get("max_window_layers", 28)) if settings.get("use_sliding_window") and window else layers
        return ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    return None
