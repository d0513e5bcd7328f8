"""Small fields into bytes and back, by torch's shifts and masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def join(fields: Tensor, width: int) -> Tensor:
    """(..., k, n) fields of `width` bits -> (..., n) bytes; field i of k begins at bit width * i."""
    packed = fields[..., 0, :]
    for i in range(1, fields.shape[-2]):
        packed = packed | (fields[..., i, :] << (width * i))
    return packed


def split(packed: Tensor, width: int) -> Tensor:
    """(..., n) bytes -> (..., 8 / width, n) fields."""
    import torch

    return torch.stack([(packed >> shift) & (2**width - 1) for shift in range(0, 8, width)], -2)


def halves(codes: Tensor) -> Tensor:
    """(..., 2n) nibbles -> (..., n) bytes: the first n low, the others high. `join` for two fields that lie one after the other."""
    n = codes.shape[-1] // 2
    return codes[..., :n] | (codes[..., n:] << 4)


def unhalve(packed: Tensor) -> Tensor:
    import torch

    return torch.cat([packed & 15, packed >> 4], -1)


def float16_bytes(values: Tensor) -> Tensor:
    """(..., n) float16 -> (..., 2n) bytes."""
    import torch

    return values.contiguous().view(torch.uint8)


def bytes_float16(stored: Tensor) -> Tensor:
    import torch

    # a copy: the two bytes of a lone block can count as contiguous while their stride is the block's
    return stored.clone(memory_format=torch.contiguous_format).view(torch.float16)
