"""`--params 7B`, `30B-A3B`, `8x7B`: a model of which only the size is known, as the published shape that most models of that size have."""

from __future__ import annotations

import math
import re
from typing import Any

from fewbits.errors import InputError
from fewbits.inspection.capacity import configs
from fewbits.planning import footprint
from fewbits.planning.footprint import Parameters

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) *([KMBGT]?)"
_SAME = 0.05  # a size within this share of a published one means that one: 7B is Mistral's 7.24
_BLOCK = 256  # columns of a block of most types
_NEAR = 0.2  # of the parameters that a token meets: published figures count them in several ways

# (numbers, hidden, layers, heads, heads of keys, MLP, vocabulary, tied)
_DENSE = (
    ("SmolLM2 135M", 135e6, 576, 30, 9, 3, 1536, 49152, True),
    ("SmolLM2 360M", 362e6, 960, 32, 15, 5, 2560, 49152, True),
    ("Llama 3.2 1B", 1.24e9, 2048, 16, 32, 8, 8192, 128256, True),
    ("Llama 3.2 3B", 3.21e9, 3072, 28, 24, 8, 8192, 128256, True),
    ("Mistral 7B", 7.24e9, 4096, 32, 32, 8, 14336, 32000, False),
    ("Llama 3.1 8B", 8.03e9, 4096, 32, 32, 8, 14336, 128256, False),
    ("Llama 2 13B", 13.0e9, 5120, 40, 40, 40, 13824, 32000, False),
    ("Yi 34B", 34.4e9, 7168, 60, 56, 8, 20480, 64000, False),
    ("Llama 3.1 70B", 70.6e9, 8192, 80, 64, 8, 28672, 128256, False),
    ("Mistral Large 123B", 122.6e9, 12288, 88, 96, 8, 28672, 32768, False),
    ("Llama 3.1 405B", 405.9e9, 16384, 126, 128, 8, 53248, 128256, False),
)
# (numbers, those a token meets, hidden, layers, heads, heads of keys, width of a head, experts, chosen, their MLP, vocabulary)
_MIXTURES = (
    ("Qwen3 30B-A3B", 30.5e9, 3.3e9, 2048, 48, 32, 4, 128, 128, 8, 768, 151936),
    ("Mixtral 8x7B", 46.7e9, 12.9e9, 4096, 32, 32, 8, 128, 8, 2, 14336, 32000),
    ("Mixtral 8x22B", 140.6e9, 39.2e9, 6144, 56, 48, 8, 128, 8, 2, 16384, 32768),
    ("Qwen3 235B-A22B", 235e9, 22.2e9, 4096, 94, 64, 4, 128, 128, 8, 1536, 151936),
    ("gpt-oss 20B", 20.9e9, 3.6e9, 2880, 24, 64, 8, 64, 32, 4, 2880, 201088),
    ("gpt-oss 120B", 116.8e9, 5.1e9, 2880, 36, 64, 8, 64, 128, 4, 2880, 201088),
)
_BY_NAME = {"8x7b": "46.7B-A12.9B", "8x22b": "140.6B-A39.2B"}


def settings(text: str) -> tuple[dict[str, Any], str]:
    """The config of such a model, and what was assumed, for a person."""
    spelled = _BY_NAME.get(text.strip().lower(), text.strip())
    total, dash, active = re.sub(r"[ _]", "", spelled).upper().partition("-A")
    return _mixture(_count(total, text), _count(active, text), text) if dash else _dense(_count(spelled, text))


def _dense(wanted: int) -> tuple[dict[str, Any], str]:
    like, size, hidden, layers, heads, kv_heads, mlp, vocabulary, tied = min(_DENSE, key=lambda row: abs(math.log(row[1] / wanted)))
    config = {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocabulary,
        "num_key_value_heads": kv_heads, "intermediate_size": mlp, "tie_word_embeddings": tied, "max_position_embeddings": 131072,
    }  # fmt: skip
    config = _with_layers(config, wanted, abs(size / wanted - 1) < _SAME)
    shape = f"{config['num_hidden_layers']} layers of {hidden}, {heads} heads, {kv_heads} of keys and values, MLP {mlp}"
    return config, f"a Llama like {like}: {shape}, vocabulary {vocabulary:,}; {_size(_numbers(config).total)} numbers in matrices"


def _mixture(wanted: int, active: int, text: str) -> tuple[dict[str, Any], str]:
    if active >= wanted:
        raise InputError(f"`--params {text}` has more active parameters than it has", "for example 30B-A3B: 30B, of which a token meets 3B")
    published = [row for row in _MIXTURES if abs(row[1] / wanted - 1) < _SAME and abs(row[2] / active - 1) < _NEAR]
    usual = [row for row in _MIXTURES if row[3] % _BLOCK == 0]  # gpt-oss has widths that rule most types out
    # the share of a model that a token meets says more of its experts than its size does
    known = min(published or usual, key=lambda row: abs(math.log(row[1] / wanted)) + 3 * abs(math.log(row[1] / row[2] * active / wanted)))
    like, _, _, hidden, layers, heads, kv_heads, width, experts, chosen, mlp, vocabulary = known
    config = {
        "model_type": "qwen3_moe", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": width,
        "vocab_size": vocabulary, "num_key_value_heads": kv_heads, "intermediate_size": mlp, "moe_intermediate_size": mlp,
        "num_experts": experts, "num_experts_per_tok": chosen, "tie_word_embeddings": False, "max_position_embeddings": 131072,
    }  # fmt: skip
    config = _with_layers(config, wanted, bool(published))
    if not published:  # as many experts for a token as come nearest to what it is to meet
        counts = range(1, experts + 1)
        chosen = min(counts, key=lambda count: abs(_numbers(config | {"num_experts_per_tok": count}).active - active))
        config |= {"num_experts_per_tok": chosen}
    made = _numbers(config)
    shape = f"{config['num_hidden_layers']} layers of {hidden}, {chosen} of {experts} experts of {mlp} for a token"
    return config, f"a mixture of experts like {like}: {shape}; {_size(made.total)} numbers in matrices, a token meets {_size(made.active)}"


def _with_layers(config: dict[str, Any], wanted: int, same: bool) -> dict[str, Any]:
    """With the number of layers that gives so many numbers; unchanged if it is the `same` size."""
    if not same:
        one, two = (_numbers(config | {"num_hidden_layers": layers}).total for layers in (1, 2))
        config = config | {"num_hidden_layers": max(1, round((wanted - (2 * one - two)) / (two - one)))}
        if not 0.5 < _numbers(config).total / wanted < 2:
            raise InputError(
                f"no typical Llama has {wanted:,} parameters", "from about 30M to 2T are known here; give a config.json instead"
            )
    return config


def _numbers(config: dict[str, Any]) -> Parameters:
    return footprint.parameters(footprint.shape(configs.of(config)))


def _size(numbers: int) -> str:
    return f"{numbers / 1e9:.3g}B"


def _count(text: str, asked: str) -> int:
    match = re.fullmatch(_NUMBER, text.strip(), re.IGNORECASE)
    if not match or not float(match[1]):
        raise InputError(
            f"`--params {asked}` is no number of parameters", "for example 7B, 1.5B, 135M, or 30B-A3B for a mixture of experts"
        )
    number = float(match[1]) * _UNITS.get(match[2].upper(), 1)
    if not match[2] and number < 1000:
        raise InputError(f"`--params {asked}` has no unit", f"did you mean `{match[1]}B`?")
    return round(number)
