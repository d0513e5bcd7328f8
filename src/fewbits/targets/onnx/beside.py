"""Arrays beside a graph and not in it, because protobuf ends at 2 GiB: one file, each array where a cache line begins.

Sizes are known from shapes, so that a graph can name the places before there is anything to put there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import onnx
import torch

from fewbits.formats import Spec

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT = 64  # a cache line: arrays are read where the file is mapped
TYPES: dict[str, int] = {
    "uint8": onnx.TensorProto.UINT8,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "float32": onnx.TensorProto.FLOAT,
}


@dataclass(frozen=True)
class Array:
    name: str
    spec: Spec
    file: str  # as the graph names it
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.spec.nbytes

    def initializer(self) -> Any:
        """Its name, type and place, without its values."""
        proto = onnx.TensorProto(name=self.name, data_type=TYPES[self.spec.dtype], dims=self.spec.shape)
        proto.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", self.file), ("offset", str(self.offset)), ("length", str(self.spec.nbytes))):
            proto.external_data.add(key=key, value=value)
        return proto


def layout(specs: Mapping[str, Spec], file: str) -> dict[str, Array]:
    """One after another."""
    placed: dict[str, Array] = {}
    end = 0
    for name, spec in specs.items():
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        placed[name] = Array(name, spec, file, offset)
        end = placed[name].end
    return placed


def nbytes(placed: Mapping[str, Array]) -> int:
    return max(array.end for array in placed.values())


def octets(tensor: Tensor) -> memoryview:
    """As they lie in a file. A copy, in order: scales may be one value with strides of 0, or a number without dimensions."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor)
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data


def write(stream: BinaryIO, placed: Mapping[str, Array], arrays: Iterator[tuple[str, Tensor]]) -> None:
    """In the order of their places, each forgotten when it is written."""
    for name, tensor in arrays:
        array = placed[name]
        assert (tuple(tensor.shape), str(tensor.dtype)) == (array.spec.shape, f"torch.{array.spec.dtype}"), name
        stream.write(bytes(array.offset - stream.tell()))
        stream.write(octets(tensor))
        del tensor
    assert stream.tell() == nbytes(placed)
