"""A safetensors file, opened: the library checks it, torch maps it.

Not by the library's own `get_tensor`: each call loses two integers, the ends of a slice (0.5 to 0.8 do), and a long run reads millions of
tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from fewbits.tensor_types import DTYPES

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

__all__ = ["SafetensorError", "TensorFile"]

_DIMENSIONS = 16


class TensorFile:
    """What is not sound raises SafetensorError or OSError, here and in every call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._spans = _spans(path)
        self._checked: Any = safe_open(path, framework="numpy")  # offsets and sizes too

    def keys(self) -> list[str]:
        return list(self._checked.keys())

    def metadata(self) -> dict[str, str]:
        return dict(self._checked.metadata() or {})

    def dtype(self, name: str) -> str:
        """As the file says it."""
        return str(self._checked.get_slice(name).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._checked.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """Mapped, not read: pages come from the file when they are touched, and are let go of when memory is short."""
        import torch

        stored, shape = self.dtype(name), self.shape(name)
        if stored not in DTYPES:
            raise SafetensorError(f"`{name}` is stored as {stored}")
        dtype = getattr(torch, DTYPES[stored])
        try:
            if 0 in shape:
                return torch.empty(shape, dtype=dtype)
            begins, ends = self._spans[name]
            return torch.asarray(self._mapped[begins:ends], dtype=torch.uint8).view(dtype).reshape(shape)
        except (TypeError, RuntimeError) as failure:  # nothing, of 2^64 columns: its bytes fit, its strides do not
            raise SafetensorError(f"`{name}` has a shape that no tensor has") from failure

    @cached_property
    def _mapped(self) -> Any:
        import torch

        return torch.UntypedStorage.from_file(str(self.path), False, self.path.stat().st_size)


def _spans(path: Path) -> dict[str, tuple[int, int]]:
    """First byte of each tensor, and the one after its last. Checked here is what the library does not: that the header takes no more
    room in memory than an honest one, that every name is there once (the library takes the last of two, another reader the first), and
    that shapes are ones which a tensor can have (it takes any with a 0 in it)."""
    length, header = _header(path)
    try:
        said = json.loads(header, object_pairs_hook=_each_once)
        found = {name: (entry["shape"], entry["data_offsets"]) for name, entry in said.items() if name != "__metadata__"}
        for name, (shape, _) in found.items():
            if len(shape) > _DIMENSIONS or math.prod(size or 1 for size in shape) >= 1 << 62:
                raise SafetensorError(f"no tensor has the shape of `{name}`")
        return {name: (8 + length + begins, 8 + length + ends) for name, (_, (begins, ends)) in found.items()}
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as failure:
        raise SafetensorError(f"its header is not valid: {failure!r}") from failure


def _header(path: Path) -> tuple[int, bytes]:
    from fewbits.checkpoints import limits

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > os.fstat(file.fileno()).st_size - 8:
            raise SafetensorError(f"its header of {length:,} bytes goes beyond its end")
        if length > limits.TEXT:
            raise SafetensorError(f"its header has {length:,} bytes, more than {limits.TEXT:,}")
        header = file.read(length)
    limits.check_decoded(header, path)
    if limits.values_in(header) > limits.VALUES:
        raise SafetensorError(f"its header holds more than {limits.VALUES:,} values")
    return length, header


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise SafetensorError(f"`{Counter(name for name, _ in pairs).most_common(1)[0][0]}` is there twice")
    return found
