"""Numbers as they come from a file: checked, and at an address that does not depend on the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fewbits.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

_ABSURD = 1.1e30  # no weight is so large, and its square would be infinite in float32; llama.cpp writes 1e30 for `never rotated`


def on_a_cache_line(matrix: Tensor) -> Tensor:
    """The same matrix, at an address that begins a cache line. A mapped file may hold it at any address, and elsewhere a product with one
    row adds up in another order: results would depend on the layout of the file."""
    return matrix.clone() if matrix.data_ptr() % 64 else matrix


def checked_finite(tensor: Tensor, name: str) -> Tensor:
    """The same tensor, or an error that names the place of a value that is NaN, infinite, or too large to multiply."""
    if not tensor.numel() or not tensor.is_floating_point():
        return tensor
    low, high = tensor.aminmax()  # NaN propagates; one pass over memory, where testing every element takes three
    if float(low) >= -_ABSURD and float(high) <= _ABSURD:
        return tensor
    place = tuple((~(tensor.float().abs() <= _ABSURD)).nonzero()[0].tolist())
    where = f"row {place[0]}, column {place[1]}" if len(place) == 2 else f"position {place[0]}" if len(place) == 1 else f"{place}"
    raise InputError(f"`{name}` holds {tensor[place].item():g} at {where}", "the checkpoint is damaged")
