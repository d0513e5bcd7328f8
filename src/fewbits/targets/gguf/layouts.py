"""The GGUF type that a format is stored as.

A format that is a GGUF type is copied. One with the values of a GGUF type is changed to its layout, exactly:
int4_g32 becomes Q4_0, int8_channel becomes Q8_0 with its scale repeated. Nothing is rounded here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from fewbits import formats
from fewbits.model.gguf import types

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Format, Parts

_CASTS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_NAMES = {"F32": "fp32", "F16": "fp16"}  # of types whose name here is not ggml's in lower case
_ONE_SCALE = ("q4_0", "q5_0", "q8_0")  # GGUF types of the form scale * level, whose values other formats share
_ANY = (256, 256)  # a shape that every format fits


@dataclass(frozen=True)
class Layout:
    type: str  # ggml's name: `Q4_K`
    block: int
    block_bytes: int
    convert: Callable[[Parts], Tensor]  # -> (rows, bytes of a row) uint8

    @property
    def format(self) -> str:
        """The format that a file of this type is read back as: `q4_0` for int4_g32."""
        return format_of(self.type)

    def nbytes(self, shape: tuple[int, int]) -> int:
        return shape[0] * shape[1] // self.block * self.block_bytes


@cache
def layout(fmt: Format) -> Layout | None:
    """By structure: float, a GGUF type itself, or one with the values of a GGUF type. None: GGUF cannot store it."""
    specs = fmt.parts(_ANY)
    if fmt.is_cast:
        dtype = specs["values"].dtype if specs.keys() == {"values"} else ""
        size = specs["values"].nbytes // (_ANY[0] * _ANY[1]) if dtype else 0
        return Layout(_CASTS[dtype], 1, size, lambda parts: octets(parts["values"])) if dtype in _CASTS else None
    ggml = types.BY_NAME.get(fmt.name.upper())
    if ggml is not None and specs.keys() == {"blocks"}:
        same_size = fmt.block == ggml.block and fmt.nbytes(_ANY) == _ANY[0] * _ANY[1] // ggml.block * ggml.nbytes
        return Layout(ggml.name, ggml.block, ggml.nbytes, lambda parts: parts["blocks"]) if same_size else None
    return _same_values(fmt)


def _same_values(fmt: Format) -> Layout | None:
    """A format of codes and float16 scales whose levels a GGUF type shares: its scales, repeated, are that type's."""
    specs = fmt.parts(_ANY)
    if specs.keys() != {"codes", "scales"} or specs["scales"].dtype != "float16":
        return None
    for name in _ONE_SCALE:
        twin = formats.get(name)
        if twin.levels == fmt.levels and twin.group and (fmt.group is None or fmt.group % twin.group == 0):
            other = layout(twin)
            assert other
            return Layout(other.type, other.block, other.block_bytes, lambda parts, twin=twin: _repacked(fmt, twin, parts))  # type: ignore[misc]
    return None


def _repacked(fmt: Format, twin: Format, parts: Parts) -> Tensor:
    codes, grid = fmt.unpack(parts)
    assert twin.group
    scale, offset = fmt.affine(grid, slice(0, codes.shape[1], twin.group))
    assert offset is None, "codes and scales alone leave no room for an offset"
    return twin.pack(codes, {"d": scale.expand(len(codes), codes.shape[1] // twin.group).half()})["blocks"]


def octets(values: Tensor) -> Tensor:
    import torch

    return values.contiguous().view(torch.uint8)


def format_of(type_name: str) -> str:
    """Our name of one of ggml's types."""
    return _NAMES.get(type_name, type_name.lower())
