"""A safetensors file, opened: the library checks it, torch maps it.

Not by the library's own `get_tensor`: each call loses two integers, the ends of a slice (0.5 to 0.8 do), and a long run reads millions of
tensors.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from fewbits.tensor_types import DTYPES

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

__all__ = ["SafetensorError", "TensorFile"]


class TensorFile:
    """What is not sound raises SafetensorError or OSError, here and in every call."""

    def __init__(self, path: Path) -> None:
        self.path = path
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
    def _spans(self) -> dict[str, tuple[int, int]]:
        """First byte of each tensor, and the one after its last."""
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        said = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
        return {name: (8 + length + begins, 8 + length + ends) for name, (begins, ends) in said.items()}

    @cached_property
    def _mapped(self) -> Any:
        import torch

        return torch.UntypedStorage.from_file(str(self.path), False, self.path.stat().st_size)
