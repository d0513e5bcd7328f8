"""The arrays of a written folder and their sizes, read from its graph by `onnx` alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.targets.onnx.contents import CASTS, read
from fewbits.targets.stored_tensor import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor


_PARTS = ("codes", "scales", "zeros", "values")


def weight_bytes(path: Path) -> int:
    """Of the weights alone, without norms, biases and rotary tables."""
    return sum(_place(tensor)[1] for tensor in read(path).graph.initializer if tensor.name.rpartition(".")[2] in _PARTS)


def contents(path: Path) -> tuple[str, dict[str, Any], list[StoredTensor]]:
    """For `fewbits inspect`: every array with its type and size, and how to get its values if they are floats."""
    import onnx

    model = read(path)
    metadata: dict[str, Any] = {prop.key: prop.value for prop in model.metadata_props}
    tensors: list[StoredTensor] = []
    for tensor in model.graph.initializer:
        if not tensor.external_data:
            continue  # shapes and single numbers, part of the graph
        kind = onnx.TensorProto.DataType.Name(tensor.data_type)
        load = partial(_values, path, tensor) if kind in CASTS else None
        tensors.append(StoredTensor(tensor.name, kind.lower(), tuple(tensor.dims), _place(tensor)[1], load))
    return "onnxruntime-genai", metadata, tensors


def _place(tensor: Any) -> tuple[int, int]:
    """(offset, length) in the file beside the graph."""
    said = {entry.key: entry.value for entry in tensor.external_data}
    return int(said.get("offset", 0)), int(said.get("length", 0))


def _values(path: Path, tensor: Any) -> Tensor:
    import onnx
    import torch

    offset, length = _place(tensor)
    with (path / "model.onnx.data").open("rb") as file:
        file.seek(offset)
        content = bytearray(file.read(length))
    dtype = {"FLOAT16": torch.float16, "BFLOAT16": torch.bfloat16, "FLOAT": torch.float32}
    return torch.frombuffer(content, dtype=dtype[onnx.TensorProto.DataType.Name(tensor.data_type)]).reshape(tuple(tensor.dims))
