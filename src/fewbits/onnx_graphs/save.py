"""Writes the file. Tensors go to a data file beside it only if all together exceed the 2 GiB of a protobuf."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx import external_data_helper

from fewbits.errors import InputError
from fewbits.model.onnx import constants
from fewbits.store.files import Staged, beside

if TYPE_CHECKING:
    from fewbits.model.onnx.graph import OnnxModel

LARGEST = 2**31 - 2**24  # bytes of one file: the limit of protobuf, less a little for the graph
_SMALLEST_BESIDE = 1024  # bytes: smaller tensors stay in the graph, where shape inference reads them
_ALIGNED = 4096  # so that a runtime can map each tensor into memory


def save(proto: Any, model: OnnxModel, out: Path, largest: int = LARGEST) -> Path:
    """`proto` is changed: tensors from the source's data files are moved into it, or into one new data file."""
    check_output(model, out)
    parts = (part for _, graph in constants.graphs(proto) for entries in (graph.initializer, graph.node) for part in entries)
    inside = sum(part.ByteSize() for part in parts)  # part by part: the size of the whole may be more than protobuf can count
    outside = sum(_length(tensor) for tensor in _tensors(proto) if external_data_helper.uses_external_data(tensor))
    with Staged(out) as file:
        if inside + outside <= largest:
            for tensor in _tensors(proto):
                _fetch(tensor, model)
        else:
            _move_beside(proto, model, beside(file), beside(out).name)
        file.write_bytes(proto.SerializeToString(deterministic=True))
    return out


def check_output(model: OnnxModel, out: Path) -> None:
    taken = [model.path, *(model.path.parent / name for name in model.beside)]
    if any(p.exists() and p.samefile(old) for p in (out, beside(out)) for old in taken):
        raise InputError(f"`{out}` is the model itself", "choose another `-o`")


def _tensors(proto: Any) -> Iterator[Any]:
    for _, graph in constants.graphs(proto):
        yield from graph.initializer
        yield from (entry.t for node in graph.node for entry in node.attribute if entry.HasField("t"))


def _length(tensor: Any) -> int:
    if external_data_helper.uses_external_data(tensor):
        info = external_data_helper.ExternalDataInfo(tensor)
        if info.length:
            return int(info.length)
    return int(math.prod(tensor.dims)) * 8  # unknown: the most it can be


def _fetch(tensor: Any, model: OnnxModel) -> None:
    """Loads the bytes of a tensor from its data file."""
    if external_data_helper.uses_external_data(tensor):
        model.fetch(tensor)


def _move_beside(proto: Any, model: OnnxModel, file: Path, location: str) -> None:
    with file.open("wb") as stream:
        for _, graph in constants.graphs(proto):
            for tensor in graph.initializer:
                _fetch(tensor, model)  # one at a time: never all of them in memory
                if not tensor.HasField("raw_data") or len(tensor.raw_data) < _SMALLEST_BESIDE:
                    continue
                stream.write(bytes(-stream.tell() % _ALIGNED))
                external_data_helper.set_external_data(tensor, location, offset=stream.tell(), length=len(tensor.raw_data))
                stream.write(tensor.raw_data)
                tensor.ClearField("raw_data")
