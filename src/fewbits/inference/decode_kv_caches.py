"""The KV cache of the native decoder, for all layers: in float16, or really packed in the plan's format.

Models that transformers runs have emulated_kv_cache.py instead, which computes the same values in the memory of floats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fewbits.formats.runtime import kv as kv_formats
from fewbits.kernels import attention

if TYPE_CHECKING:
    from torch import Tensor

_LANES = 16  # tokens whose keys are stored side by side; native/attention/float16.h


class HalfCache:
    """Float16; room for `context` tokens is allocated at once."""

    def __init__(self, layers: int, heads: int, width: int, context: int) -> None:
        self.context, self._shape = context, (layers, heads, -(-context // _LANES) * _LANES, width)
        self.keys, self.values = (torch.zeros(self._shape, dtype=torch.float16) for _ in range(2))
        self._grouped = self.keys.view(layers, heads, -1, width, _LANES)
        self.native = tuple(cache.view(torch.uint16).numpy() for cache in (self.keys, self.values))

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def forget(self) -> None:
        pass  # the next text overwrites it

    def append(self, layer: int, first: int, keys: Tensor, values: Tensor) -> None:  # (heads, tokens, width)
        positions = torch.arange(first, first + keys.shape[1])
        self._grouped[layer][:, positions // _LANES, :, positions % _LANES] = keys.half().transpose(0, 1)
        self.values[layer][:, first : first + keys.shape[1]] = values.half()

    def read(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:  # -> (heads, tokens, width) float32, twice
        keys = self._grouped[layer].transpose(2, 3).flatten(1, 2)[:, :tokens]
        return keys.float(), self.values[layer][:, :tokens].float()


class PackedCaches:
    """One packed cache per layer. A prompt is appended a group of tokens at a time, so that attention reads what it would read while
    decoding token by token."""

    def __init__(self, name: str, layers: int, heads: int, width: int) -> None:
        self.format, self._shape = kv_formats.get(name), (layers, heads, width)
        self.forget()

    def forget(self) -> None:
        layers, heads, width = self._shape
        self.layers = [attention.PackedCache(self.format, 1, heads, width) for _ in range(layers)]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


def unsupported_cache(name: str) -> str | None:
    """Why a cache of this format cannot be packed; None if it can, or is `float`, which needs no packing."""
    return None if name == "float" else attention.unsupported(kv_formats.get(name))
