"""Which types a GGUF holds its weights in: a file that is quantized is no float original, whatever is made of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64"})
_PUBLISHED = frozenset({"MXFP4"})  # models are trained for it and published in it: such a file lost nothing


@dataclass(frozen=True)
class StoredTypes:
    """Of a file in which some matrices are quantized."""

    names: tuple[str, ...]  # the type of most numbers first
    bits: float  # per weight
    lossy: bool  # some weights were rounded from floats that the file no longer has

    def __str__(self) -> str:
        return f"{', '.join(self.names)}; {self.bits:.2f} bits per weight"


def stored_types(tensors: Iterable[Any]) -> StoredTypes | None:
    """None: all matrices are floats."""
    numbers, nbytes = Counter[str](), 0
    for tensor in tensors:
        if len(tensor.shape) > 1:
            numbers[tensor.tensor_type.name] += math.prod(map(int, tensor.shape))
            nbytes += int(tensor.n_bytes)
    if not numbers.keys() - _FLOATS:
        return None
    names = tuple(name.lower() for name, _ in numbers.most_common())
    return StoredTypes(names, 8 * nbytes / numbers.total(), lossy=bool(numbers.keys() - _FLOATS - _PUBLISHED))
