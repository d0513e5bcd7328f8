"""Arrays in the same file as their graph, written and skipped without having them all in memory.

Protobuf accepts the fields of a message in any order. So the graph is written without its arrays, and they follow one by one:

    model, all but its graph | graph: length, all but the arrays | array: length, name and type and shape, values | array ...

Every length comes before its content. Lengths follow from shapes, so none has to wait for the values. A file is read without its values
in the same way, because `onnx.load` holds them twice.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import onnx

from fewbits.formats import Spec
from fewbits.model.onnx.external_data import TYPES, octets

if TYPE_CHECKING:
    from torch import Tensor

_GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER
_ARRAY = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
_VALUES = onnx.TensorProto.RAW_DATA_FIELD_NUMBER
_KINDS = ("raw", "float", "int32", "string", "int64", "double", "uint64")
_ALL_VALUES = {getattr(onnx.TensorProto, f"{kind.upper()}_DATA_FIELD_NUMBER") for kind in _KINDS}
_BYTES = 2  # protobuf's wire type of fields that begin with their length
_FIXED = {1: 8, 5: 4}  # wire types of fixed size -> bytes
_GRAPH_BYTES = 128 << 20  # without values
_FIELDS = 1 << 20  # at most, in a file: a graph of 10,000 nodes has 20,000


def nbytes(proto: Any, specs: Mapping[str, Spec]) -> int:
    """Exact size of the file that `write` makes."""
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
        stream.write(octets(tensor))
        del tensor  # before the next one is made
    assert not pending, sorted(pending)


def read(path: Path) -> Any:
    """The model in a file, without the values of its arrays. Raises ValueError or an error of onnx where the file is not one."""
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return onnx.ModelProto()  # an empty file is an empty message, and cannot be mapped
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return onnx.ModelProto.FromString(_without_values(content))


def _without_values(content: mmap.mmap) -> bytes:
    kept, left = bytearray(), iter(range(_FIELDS))
    for number, start, value, end in _fields(content, 0, len(content), left):
        if number != _GRAPH:
            kept += _taken(content, start, end, kept)
            continue
        graph = bytearray()
        for inner, begins, inside, ends in _fields(content, value, end, left):
            if inner != _ARRAY:
                graph += _taken(content, begins, ends, graph)
                continue
            parts = [_taken(content, a, b, graph) for which, a, _, b in _fields(content, inside, ends, left) if which not in _ALL_VALUES]
            graph += _before(_ARRAY, sum(map(len, parts))) + b"".join(parts)
        kept += _before(_GRAPH, len(graph)) + graph
    return bytes(kept)


def _taken(content: mmap.mmap, start: int, end: int, beside: bytearray) -> bytes:
    if end - start + len(beside) > _GRAPH_BYTES:
        raise ValueError(f"its graph has more than {_GRAPH_BYTES:,} bytes without its arrays")
    return content[start:end]


def _fields(content: mmap.mmap, at: int, end: int, left: Iterator[int]) -> Iterator[tuple[int, int, int, int]]:
    """(number, start, start of its value, end) of each field."""
    while at < end:
        if next(left, None) is None:
            raise ValueError(f"it has more than {_FIELDS:,} fields")
        start = at
        tag, at = _number(content, at, end)
        kind, value = tag & 7, at
        if kind == _BYTES:
            length, value = _number(content, at, end)
            at = value + length
        elif kind == 0:
            _, at = _number(content, at, end)
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            raise ValueError(f"a field at byte {start:,} is of the unknown type {kind}")
        if at > end:
            raise ValueError(f"a field at byte {start:,} goes beyond its end")
        yield tag >> 3, start, value, at


def _number(content: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """A protobuf varint (seven bits to a byte), and where it ends."""
    value = 0
    for place in range(10):
        if at >= end:
            raise ValueError("a number goes beyond its end")
        octet = content[at]
        value, at = value | (octet & 127) << 7 * place, at + 1
        if octet < 128:
            return value, at
    raise ValueError("a number has more than 64 bits")


def _arrays(specs: Mapping[str, Spec]) -> int:
    sizes = [len(_head(name, spec)) + spec.nbytes for name, spec in specs.items()]
    return sum(len(_before(_ARRAY, size)) + size for size in sizes)


def _head(name: str, spec: Spec) -> bytes:
    """The bytes of an array up to its values."""
    empty = onnx.TensorProto(name=name, data_type=TYPES[spec.dtype], dims=spec.shape)
    return bytes(empty.SerializeToString(deterministic=True)) + _before(_VALUES, spec.nbytes)


def _before(field: int, length: int) -> bytes:
    """The bytes before a field with a length: its number with the wire type, and the length as a varint."""
    octets = bytearray([field << 3 | _BYTES])
    while length >= 128:
        octets.append(length & 127 | 128)
        length >>= 7
    octets.append(length)
    return bytes(octets)
