"""A tensor of a file that fewbits may not have written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StoredTensor:
    """A quantized weight of a layer, with all its tensors, or any other tensor."""

    name: str  # of the layer, or of the tensor
    type: str  # the format of its values: int4_g32, fp8_e4m3_channel, bf16
    shape: tuple[int, ...]
    nbytes: int  # of all its tensors, the scale of its input included
    load: Callable[[], Tensor] | None  # its values, decoded to float32 if quantized; None: they are integers
