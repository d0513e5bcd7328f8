"""The formats of a KV cache: what keys and values are rounded to, what shares a scale, and the bytes of a context. Loads no torch.

Values are rounded per token: each head's channels under one scale, or every so many of them. Keys may be rounded per channel instead,
over a group of consecutive tokens: a few channels of the keys are large in every token, and under a scale per token all others would be
rounded in steps that are too coarse for them. A group is rounded once its last token has come; until then its keys and values stay in
float. With `minimum` a value is scale * code + minimum, both float16; without, scale * level.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Literal

from fewbits.errors import InputError
from fewbits.formats.fp8 import values as float8

_FLOAT_BYTES, _SCALE_BYTES = 2, 2


@dataclass(frozen=True, kw_only=True)
class KVFormat:
    name: str  # as in `--kv`
    about: str
    bits: int  # of a code
    levels: tuple[float, ...] | None  # of each code; None: not rounded
    minimum: bool = False  # levels start at 0, and a minimum is stored beside each scale
    largest: float = 0.0  # without minimum: the level that the largest magnitude is put at
    keys: Literal["channel", "token"] = "token"
    group: int = 1  # tokens rounded together
    channels: int | None = None  # of a token under one scale; None: all of a head
    sink: int = 0  # tokens at the start that always stay in float

    def rounded_after(self, tokens: int) -> int:
        """How many of the first tokens a cache of this many has rounded, the sink included."""
        return self.sink + max(0, tokens - self.sink) // self.group * self.group

    def pieces(self, tokens: list[int]) -> list[list[int]]:
        """A sequence in the pieces that may be computed at once: a group is complete only at the end of a piece."""
        if self.group == 1:
            return [tokens]
        first = self.sink + self.group
        return [tokens[:first], *(tokens[i : i + self.group] for i in range(first, len(tokens), self.group))]

    def head_bytes(self, width: int, tokens: int) -> int:
        """Of keys and values of one head."""
        rounded = max(0, self.rounded_after(tokens) - self.sink) if self.levels else 0
        codes = -(-width * self.bits // 8)
        scale = _SCALE_BYTES * (2 if self.minimum else 1)
        per_token = codes + scale * (-(-width // self.channels) if self.channels else 1)
        keys = rounded * per_token if self.keys == "token" else rounded * codes + rounded // self.group * width * scale
        return keys + rounded * per_token + (tokens - rounded) * 2 * width * _FLOAT_BYTES


def _integers(bits: int) -> dict[str, Any]:
    return {"bits": bits, "levels": tuple(float(code) for code in range(1 << bits)), "minimum": True}


# Why these settings: KL to the float cache on SmolLM2 135M (off its grid, wikitext-2 valid, 1,000 to 4,000 tokens), contexts of 512 unless
# said otherwise.
#   keys per channel   int4 3.9e-3, int8 1.4e-5; keys per token, 32 channels to a scale: int4 1.1e-2, int8 (a head to a scale) 6.6e-5
#   newest group float int4 per token without it 4.5e-2, 1.1e-2 with it: attention reads near tokens most
#   sink               int4 without it 7.5e-3: the first key is unlike the others and widens the range of its group. Four tokens: no better
#   group              int4 64 tokens 4.7e-3, 32 tokens 4.4e-3 (contexts of 2048), for a quarter of a bit more; with 64, twice as many
#                      tokens stay in float
#   channels           int4 values with 32 channels to a scale 3.9e-3: no better than a head's 64, at half a bit more
#   fp8                5.3e-3; without a scale 6.5e-3; with the newest group in float 1.3e-3. It is rounded at once because that is what
#                      runtimes with a float8 cache do
_STREAMED: dict[str, Any] = {"keys": "channel", "group": 32, "sink": 1}

FORMATS = (
    KVFormat(name="float", about="as the model computes them, 16 bits", bits=16, levels=None),
    KVFormat(name="fp8", about="float8 e4m3, one scale per token and head", bits=8, levels=float8(4, 3, infinite=False), largest=448.0),
    KVFormat(name="int8", about="8 bits: keys per channel and 32 tokens, values per token", **_STREAMED, **_integers(8)),
    KVFormat(name="int4", about="4 bits: keys per channel and 32 tokens, values per token", **_STREAMED, **_integers(4)),
)


def all() -> dict[str, KVFormat]:
    return {fmt.name: fmt for fmt in FORMATS}


def get(name: str) -> KVFormat:
    known = all()
    if name.lower() in known:
        return known[name.lower()]
    near = difflib.get_close_matches(name.lower(), known, n=1)
    raise InputError(
        f"no KV cache format is named `{name}`", f"did you mean `{near[0]}`?" if near else f"known formats: {', '.join(known)}"
    )


def unsupported(config: Any) -> str | None:
    """Why a model with this config has no cache of keys and values that could be rounded; None if it has."""
    config = text_config(config)
    strange = {str(kind) for kind in getattr(config, "layer_types", None) or []} - {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
    }
    return f"{config.model_type} has layers of {', '.join(sorted(strange))}" if strange else None


def nbytes(config: Any, fmt: KVFormat, tokens: int) -> int:
    """Exact size of one sequence's cache. Layers with a sliding window are counted as if they kept all tokens."""
    layers, heads, width = _shape(config)
    return layers * heads * fmt.head_bytes(width, tokens)


def bytes_per_token(config: Any, fmt: KVFormat) -> float:
    """Of each further token, averaged over a group."""
    return (nbytes(config, fmt, fmt.sink + 2 * fmt.group) - nbytes(config, fmt, fmt.sink + fmt.group)) / fmt.group


def bits_per_value(config: Any, fmt: KVFormat, tokens: int | None = None) -> float:
    """Of a cache of this many tokens, or (None) of a long one: scales, minima and tokens in float included."""
    layers, heads, width = _shape(config)
    total = bytes_per_token(config, fmt) if tokens is None else nbytes(config, fmt, tokens) / tokens
    return 8 * total / (layers * heads * 2 * width)


def _shape(config: Any) -> tuple[int, int, int]:
    """(layers, heads of keys and values, channels of a head)"""
    config = text_config(config)
    heads = largest(config, "num_attention_heads")
    if not heads:
        raise InputError(f"{config.model_type} has no heads of attention, and no cache of keys and values", "leave `--kv` out")
    width = largest(config, "head_dim") or int(config.hidden_size) // heads
    return int(config.num_hidden_layers), largest(config, "num_key_value_heads") or heads, width


def text_config(config: Any) -> Any:
    """The config of the language model in that of a model which reads pictures too."""
    if not hasattr(config, "get_text_config"):  # read without transformers
        return getattr(config, "text_config", None) or config
    try:
        return config.get_text_config()
    except ValueError:  # it has several: an encoder and a decoder
        return config


def largest(config: Any, *names: str) -> int:
    """The first of these sizes that the config has, 0 if it has none. Of one that differs from layer to layer the largest: what is counted
    with it is then an upper bound."""
    return next((size for name in names if (size := _largest(config, name))), 0)


def _largest(config: Any, name: str) -> int:
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers wants to be asked for each layer
        value = [getattr(layer, name, None) for layer in config.per_layer_config]
    return max((int(size or 0) for size in value), default=0) if isinstance(value, list | tuple) else int(value or 0)
