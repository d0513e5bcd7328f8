"""Tensors as the native module takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def as_bytes(stored: Tensor) -> NDArray[Any]:
    """The tensor's memory as (rows, bytes); copied only if it is not contiguous."""
    stored = stored.detach().contiguous()
    if stored.stride(-1) != 1:  # torch calls a single element contiguous whatever its stride, but refuses to view it as bytes
        stored = stored.clone(memory_format=torch.contiguous_format)
    octets: NDArray[Any] = stored.view(torch.uint8).numpy()
    return octets
