"""A safetensors file: the library checks it, torch maps it.

The library's own `get_tensor` is not used: each call leaks two integers, the ends of a slice (versions 0.5 to 0.8), and a long run reads
millions of tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from fewbits.store.dtypes import DTYPES

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

__all__ = ["SafetensorError", "TensorFile"]

_DIMENSIONS = 16
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class TensorFile:
    """Damaged files raise SafetensorError or OSError, here and in every method."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._spans = _spans(path)
        self._checked: Any = safe_open(path, framework="numpy")  # checks offsets and sizes

    def keys(self) -> list[str]:
        return list(self._checked.keys())

    def metadata(self) -> dict[str, str]:
        return dict(self._checked.metadata() or {})

    def dtype(self, name: str) -> str:
        """As it is spelled in the file: `F16`, `BF16`."""
        return str(self._checked.get_slice(name).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._checked.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """Mapped, not read: the system loads pages when they are touched, and drops them when memory is short."""
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
        except (TypeError, RuntimeError) as failure:  # zero rows of 2^64 columns: no bytes, but strides that overflow
            raise SafetensorError(f"`{name}` has a shape that no tensor has") from failure

    def array(self, name: str) -> Any:
        """Floats as float32, read by numpy: for those who do not need torch otherwise."""
        import numpy as np

        stored, shape = self.dtype(name), self.shape(name)
        if stored not in _FLOATS:
            raise SafetensorError(f"`{name}` is stored as {stored}")
        begins, ends = self._spans[name]
        data = np.fromfile(self.path, _FLOATS[stored], offset=begins, count=(ends - begins) // np.dtype(_FLOATS[stored]).itemsize)
        if stored == "BF16":  # the upper half of a float32
            data = np.left_shift(data, 16, dtype=np.uint32).view(np.float32)
        return data.astype(np.float32, copy=False).reshape(shape)

    @cached_property
    def _mapped(self) -> Any:
        import torch

        return torch.UntypedStorage.from_file(str(self.path), False, self.path.stat().st_size)


def _spans(path: Path) -> dict[str, tuple[int, int]]:
    """The first byte of each tensor and the one after its last. Checks what the library does not: that the header takes no more memory
    than an honest one, that every name occurs once (the library takes the last of two, other readers the first), and that a tensor can
    have the shape (the library accepts any with a 0 in it)."""
    length, header = _header(path)
    try:
        entries = json.loads(header, object_pairs_hook=_each_once)
        entries.pop("__metadata__", None)
        tensors = {name: (entry["shape"], entry["data_offsets"]) for name, entry in entries.items()}
        for name, (shape, _) in tensors.items():
            if len(shape) > _DIMENSIONS or math.prod(size or 1 for size in shape) >= 1 << 62:
                raise SafetensorError(f"no tensor has the shape of `{name}`")
        return {name: (8 + length + begins, 8 + length + ends) for name, (_, (begins, ends)) in tensors.items()}
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as failure:
        raise SafetensorError(f"its header is not valid: {failure!r}") from failure


def _header(path: Path) -> tuple[int, bytes]:
    from fewbits.store import untrusted

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > os.fstat(file.fileno()).st_size - 8:
            raise SafetensorError(f"its header of {length:,} bytes goes beyond its end")
        if length > untrusted.TEXT:
            raise SafetensorError(f"its header has {length:,} bytes, more than {untrusted.TEXT:,}")
        header = file.read(length)
    untrusted.check_decoded(header, path)
    if untrusted.values_in(header) > untrusted.VALUES:
        raise SafetensorError(f"its header holds more than {untrusted.VALUES:,} values")
    return length, header


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise SafetensorError(f"`{Counter(name for name, _ in pairs).most_common(1)[0][0]}` is there twice")
    return entries
