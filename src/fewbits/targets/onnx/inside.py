"""Arrays in the same file as their graph, one in memory at a time.

Protobuf takes the fields of a message in any order. So the graph is written without its arrays, and they follow one by one:

    model, all but its graph | graph: length, all but the arrays | array: length, name and type and shape, values | array ...

Every length stands before what it counts. Sizes are known from shapes, so none has to wait for the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import onnx
import torch

from fewbits.formats import Spec
from fewbits.targets.onnx.beside import TYPES

if TYPE_CHECKING:
    from torch import Tensor

_GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER
_ARRAY = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
_VALUES = onnx.TensorProto.RAW_DATA_FIELD_NUMBER
_BYTES = 2  # protobuf's wire type of what has a length


def nbytes(proto: Any, specs: Mapping[str, Spec]) -> int:
    """Of the file that `write` makes, exactly."""
    graph = int(proto.graph.ByteSize())
    inside = graph + _arrays(specs)
    return int(proto.ByteSize()) - len(_before(_GRAPH, graph)) - graph + len(_before(_GRAPH, inside)) + inside


def write(stream: BinaryIO, proto: Any, specs: Mapping[str, Spec], arrays: Iterator[tuple[str, Tensor]]) -> None:
    """`proto`: the graph without these arrays, which come in any order, each once."""
    about, pending = onnx.ModelProto(), dict(specs)
    about.CopyFrom(proto)
    about.ClearField("graph")
    graph = proto.graph.SerializeToString(deterministic=True)
    stream.write(about.SerializeToString(deterministic=True))
    stream.write(_before(_GRAPH, len(graph) + _arrays(specs)) + graph)
    for name, tensor in arrays:
        spec = pending.pop(name)
        assert (tuple(tensor.shape), str(tensor.dtype)) == (spec.shape, f"torch.{spec.dtype}"), name
        head = _head(name, spec)
        stream.write(_before(_ARRAY, len(head) + spec.nbytes) + head)
        stream.write(tensor.contiguous().view(torch.uint8).numpy().data)
        del tensor  # before the next one is made
    assert not pending, sorted(pending)


def _arrays(specs: Mapping[str, Spec]) -> int:
    sizes = [len(_head(name, spec)) + spec.nbytes for name, spec in specs.items()]
    return sum(len(_before(_ARRAY, size)) + size for size in sizes)


def _head(name: str, spec: Spec) -> bytes:
    """All of an array but its values, which follow."""
    empty = onnx.TensorProto(name=name, data_type=TYPES[spec.dtype], dims=spec.shape)
    return bytes(empty.SerializeToString(deterministic=True)) + _before(_VALUES, spec.nbytes)


def _before(field: int, length: int) -> bytes:
    """What stands before a field with a length: its number with the wire type, and the length, seven bits to a byte, the lowest first."""
    octets = bytearray([field << 3 | _BYTES])
    while length >= 128:
        octets.append(length & 127 | 128)
        length >>= 7
    octets.append(length)
    return bytes(octets)
