"""The file, whole or not at all. Tensors go beside it only where all together would not fit a protobuf of 2 GiB."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx import external_data_helper

from fewbits.errors import InputError
from fewbits.files import Staged, beside
from fewbits.onnx_files import finding

if TYPE_CHECKING:
    from fewbits.onnx_files.reading import OnnxModel

LARGEST = 2**31 - 2**24  # of one file: the limit of protobuf, less a little for what the tensors are wrapped in
_SMALLEST_BESIDE = 1024  # bytes: smaller tensors stay in the graph, where shapes are worked out from them
_ALIGNED = 4096  # so that a runtime can map each tensor into memory


def save(proto: Any, model: OnnxModel, out: Path, largest: int = LARGEST) -> Path:
    """`proto` is changed: tensors of the source's own data files are brought in, or into one new data file."""
    check_output(model, out)
    parts = (part for _, graph in finding.graphs(proto) for entries in (graph.initializer, graph.node) for part in entries)
    inside = sum(part.ByteSize() for part in parts)  # one by one: the whole may be more than protobuf can count
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
    for _, graph in finding.graphs(proto):
        yield from graph.initializer
        yield from (entry.t for node in graph.node for entry in node.attribute if entry.HasField("t"))


def _length(tensor: Any) -> int:
    if external_data_helper.uses_external_data(tensor):
        found = external_data_helper.ExternalDataInfo(tensor)
        if found.length:
            return int(found.length)
    return int(math.prod(tensor.dims)) * 8  # not said: more than it can be


def _fetch(tensor: Any, model: OnnxModel) -> None:
    """Its bytes, as they are."""
    if external_data_helper.uses_external_data(tensor):
        model.fetch(tensor)


def _move_beside(proto: Any, model: OnnxModel, file: Path, location: str) -> None:
    with file.open("wb") as stream:
        for _, graph in finding.graphs(proto):
            for tensor in graph.initializer:
                _fetch(tensor, model)  # one at a time: never all of them in memory
                if not tensor.HasField("raw_data") or len(tensor.raw_data) < _SMALLEST_BESIDE:
                    continue
                stream.write(bytes(-stream.tell() % _ALIGNED))
                external_data_helper.set_external_data(tensor, location, offset=stream.tell(), length=len(tensor.raw_data))
                stream.write(tensor.raw_data)
                tensor.ClearField("raw_data")
