"""Rows of numbers as 64-bit hashes, by their bits: equal rows have equal hashes, and other rows all but never do.

Whatever is found by a hash is compared element by element afterwards, so a collision can cost a match and never make one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Bits = NDArray[Any]  # (rows, cols) uint16 or uint32: floats by their bits
    Hashes = NDArray[np.uint64]  # (rows,)

PIECE = 1 << 20  # numbers that are hashed or compared at a time: they stay in the cache
DECODED = "decoded"  # from a quantized type, to float32: ggml's integers have no negative zero
_TORCH = {"F32": ("float32", "int32"), "F16": ("float16", "int16"), "BF16": ("bfloat16", "int16"), DECODED: ("float32", "int32")}
_MIX = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_FOLD = np.uint64(29)  # no multiple of 16: the sign of one number of a word never falls on that of another


def bits_of(matrix: Tensor, kind: str) -> Bits:
    """The numbers of a tensor in one of GGUF's float types, or as `DECODED`."""
    import torch

    dtype, integer = _TORCH[kind]
    matrix = matrix.to(getattr(torch, dtype)).contiguous()
    if kind == DECODED:
        matrix = matrix + 0.0  # a negative zero becomes a positive one
    return matrix.view(getattr(torch, integer)).numpy().view(f"u{matrix.element_size()}")


def pieces(rows: int, cols: int) -> Iterator[slice]:
    """Some rows at a time."""
    step = max(1, PIECE // max(1, cols))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def in_order(bits: Bits) -> Hashes:
    """The hash depends on the order of the columns. Eight bytes at a time: the highest bit, a sign, is folded into lower ones first,
    because no multiplication would carry it anywhere."""
    width = bits.shape[1] * bits.itemsize
    if padding := -width % 8:
        bits = np.pad(bits, ((0, 0), (0, padding // bits.itemsize)))
    words = np.ascontiguousarray(bits).view(np.uint64)
    factors = np.random.default_rng(words.shape[1]).integers(0, 1 << 63, words.shape[1], np.uint64) * np.uint64(2) + np.uint64(1)
    return np.asarray((words ^ (words >> _FOLD)) @ factors + np.uint64(width))


def in_any_order(bits: Bits) -> Hashes:
    """The same for the same numbers in any order of the columns."""
    mixed = (bits.astype(np.uint64) + np.uint64(1)) * _MIX
    mixed ^= mixed >> _HALF
    mixed *= _MIX
    mixed ^= mixed >> _HALF
    return np.asarray(mixed.sum(1, dtype=np.uint64))
