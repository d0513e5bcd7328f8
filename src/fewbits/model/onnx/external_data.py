"""Arrays in a file beside the graph, because a protobuf message ends at 2 GiB. Each array begins at a cache line.

Sizes follow from shapes, so the graph can name the offsets before any array exists.
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

_ALIGNMENT = 64  # bytes of a cache line: runtimes read the arrays from the mapped file
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
        """Name, type, file and offset of the array, without its values."""
        proto = onnx.TensorProto(name=self.name, data_type=TYPES[self.spec.dtype], dims=self.spec.shape)
        proto.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", self.file), ("offset", str(self.offset)), ("length", str(self.spec.nbytes))):
            proto.external_data.add(key=key, value=value)
        return proto


def layout(specs: Mapping[str, Spec], file: str) -> dict[str, Array]:
    """The offset of each array, one after another."""
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
    """The bytes as stored in a file. From a contiguous copy: scales may be one value with strides of 0, or have no dimensions."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor)
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data


def write(stream: BinaryIO, placed: Mapping[str, Array], arrays: Iterator[tuple[str, Tensor]]) -> None:
    """Writes the arrays, which must come in the order of their offsets; each is freed once written."""
    for name, tensor in arrays:
        array = placed[name]
        assert (tuple(tensor.shape), str(tensor.dtype)) == (array.spec.shape, f"torch.{array.spec.dtype}"), name
        stream.write(bytes(array.offset - stream.tell()))
        stream.write(octets(tensor))
        del tensor
    assert stream.tell() == nbytes(placed)
