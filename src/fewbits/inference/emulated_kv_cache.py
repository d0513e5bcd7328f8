"""A quantized KV cache emulated inside transformers: attention reads rounded values, which are stored as floats.

The values are those of decode_kv_caches.PackedCaches. Tokens arrive in the format's pieces. Attention reads the groups that
earlier pieces completed rounded, and the piece itself in float, because a group cannot be rounded before it is complete. A format that
rounds each token by itself has no incomplete groups: every token, also the newest, is read rounded.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from fewbits.formats.storage.codes import as_float16, decode, encode

if TYPE_CHECKING:
    from fewbits.formats.runtime.kv import KVFormat


class EmulatedKVCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """Given to a transformers module as `past_key_values`; one per sequence."""

    def __init__(self, fmt: KVFormat) -> None:
        super().__init__(layer_class_to_replicate=partial(_Layer, fmt))


class _Layer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, (batch, kv heads, tokens, head width): rounded up to token `_rounded`, in float after it."""

    def __init__(self, fmt: KVFormat) -> None:
        super().__init__()
        self._format, self._rounded = fmt, fmt.sink

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states)
        start, complete = self._rounded, self._format.rounded_after(keys.shape[-2])
        if complete > start:
            self._rounded = complete
            self.keys = _replaced(keys, start, complete, rounded_keys(keys[..., start:complete, :], self._format))
            self.values = _replaced(values, start, complete, rounded_values(values[..., start:complete, :], self._format))
        return (self.keys, self.values) if self._format.group == 1 else (keys, values)


def _replaced(x: Tensor, start: int, end: int, middle: Tensor) -> Tensor:
    return torch.cat([x[..., :start, :], middle, x[..., end:, :]], dim=-2)


def rounded_keys(x: Tensor, fmt: KVFormat) -> Tensor:  # x (..., tokens, width): whole groups of tokens
    if fmt.keys == "token":
        return rounded_values(x, fmt)
    groups = x.unflatten(-2, (-1, fmt.group))
    return _rounded(groups, -2, fmt).flatten(-3, -2)


def rounded_values(x: Tensor, fmt: KVFormat) -> Tensor:  # x (..., tokens, width)
    return torch.cat([_rounded(channels, -1, fmt) for channels in x.split(fmt.channels or x.shape[-1], dim=-1)], dim=-1)


def _rounded(x: Tensor, dim: int, fmt: KVFormat) -> Tensor:
    """One scale along `dim`, and a minimum where the format has one. A cache stores both as float16, so they are rounded to it first."""
    if fmt.levels is None:
        return x
    if fmt.minimum:
        low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
        scale, offset = as_float16((high - low) / fmt.levels[-1]), as_float16(low)
    else:
        scale, offset = as_float16(x.abs().amax(dim, keepdim=True) / fmt.largest), None
    return decode(encode(x, fmt.levels, scale, offset), fmt.levels, scale, offset)
