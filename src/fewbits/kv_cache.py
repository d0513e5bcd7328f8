"""A KV cache that hands attention its keys and values as a quantized cache would, and what that costs at several context lengths.

What is emulated is a cache that streams, exactly. Tokens arrive in the format's pieces; attention reads the groups that earlier pieces
completed rounded, and its own piece in float, because a group cannot be rounded before it is complete. A format that rounds each token
by itself has no such rest: there every token, the newest too, is read rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from fewbits import kv, rounding, verification
from fewbits.errors import InputError
from fewbits.runtimes import torch as torch_runtime

if TYPE_CHECKING:
    from fewbits.kv import KVFormat
    from fewbits.model import Model
    from fewbits.progress import Progress
    from fewbits.texts import Window

_LARGEST_HALF = 65504.0


class QuantizedCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """As `past_key_values` of a transformers module; one per sequence."""

    def __init__(self, fmt: KVFormat) -> None:
        super().__init__(layer_class_to_replicate=partial(_Layer, fmt))


class _Layer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer (batch, kv heads, tokens, head's width): up to `_rounded` as they are read back, then in float."""

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
    return torch.cat([_rounded(run, -1, fmt) for run in x.split(fmt.run or x.shape[-1], dim=-1)], dim=-1)


def _rounded(x: Tensor, dim: int, fmt: KVFormat) -> Tensor:
    """One scale, and where the format has one a minimum, along `dim`: both kept as float16, and so rounded before they are used."""
    if fmt.levels is None:
        return x
    if fmt.minimum:
        low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
        scale, offset = _half((high - low) / fmt.levels[-1]), _half(low)
    else:
        scale, offset = _half(x.abs().amax(dim, keepdim=True) / fmt.largest), None
    return rounding.decode(rounding.encode(x, fmt.levels, scale, offset), fmt.levels, scale, offset)


def _half(x: Tensor) -> Tensor:
    return x.clamp(-_LARGEST_HALF, _LARGEST_HALF).half().float()


@dataclass(frozen=True)
class Row:
    """One format at one context length: the mean over all positions up to it."""

    format: str
    length: int
    tokens: int
    kl: float
    kl_ci95: tuple[float, float]
    ppl_ratio: float
    ppl_ratio_ci95: tuple[float, float]
    bits_per_value: float  # of a cache that holds `length` tokens, what stays in float included


def measure(
    model: Model, formats: Sequence[str], lengths: Sequence[int], windows: Sequence[Window], progress: Progress[Window]
) -> list[Row]:
    """Each cache against the float one. Windows are as long as the longest length: a shorter context is their beginning, because no
    token sees a later one, so that all lengths are compared on the same text by one run."""
    longest = max(lengths)
    if min(lengths) < 2 or any(len(window) < longest for window in windows) or not windows:
        raise InputError(f"no windows of {longest} tokens to measure a KV cache with", "give more text, or shorter lengths")
    module = model.module()
    sessions = {name: torch_runtime.of_module(module, kv=name) for name in formats}
    cut = [window[:longest] for window in windows]
    measured = verification.measure(torch_runtime.of_module(module), sessions, cut, progress)
    rows = []
    for name in formats:
        kl, nll, base = (
            np.array(values).reshape(len(cut), longest - 1) for values in (measured[name].kl, measured[name].nll, measured[name].nll_base)
        )
        for length in lengths:
            shown = (slice(None), slice(0, length - 1))
            divergence, ratio = kl[shown].flatten(), (nll - base)[shown].flatten()
            low, high = verification.bootstrap_ci95(ratio)
            rows.append(
                Row(
                    name, length, divergence.size, float(divergence.mean()), verification.bootstrap_ci95(divergence),
                    math.exp(ratio.mean()), (math.exp(low), math.exp(high)), kv.bits_per_value(model.config, kv.get(name), length),
                )
            )  # fmt: skip
    return rows
