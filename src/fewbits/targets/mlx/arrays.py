"""Tensors of torch as arrays of MLX, and back. One that is a vector, expanded, stays so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def to_mlx(tensor: Tensor) -> Any:
    import mlx.core as mx
    import torch

    small = tensor
    for axis in range(tensor.dim()):
        if tensor.stride(axis) == 0:
            small = small.narrow(axis, 0, 1)
    small = small.contiguous()
    bfloat16 = small.dtype == torch.bfloat16  # numpy has none
    array = mx.array(small.view(torch.uint16).numpy()).view(mx.bfloat16) if bfloat16 else mx.array(small.numpy())
    return array if small.shape == tensor.shape else mx.broadcast_to(array, tuple(tensor.shape))


def to_torch(array: Any) -> Tensor:
    import mlx.core as mx
    import numpy as np
    import torch

    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(mx.contiguous(array).view(mx.uint16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))
