"""An .onnx file, opened: its graph without the tensors that lie beside it, which are read one at a time when asked for."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
from onnx import external_data_helper, numpy_helper

from fewbits.errors import InputError
from fewbits.onnx_files import finding

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.model import Weight
    from fewbits.onnx_files.finding import Found


class OnnxModel:
    rest: tuple[str, ...] = ()  # nothing beside the weights is named: it is not touched

    def __init__(self, path: Path) -> None:
        self.path = path
        self.proto = _graph_of(path)
        if missing := next((name for name in self.beside if not (path.parent / name).is_file()), None):
            raise InputError(f"`{path.name}` keeps tensors in `{missing}`, which is not there", "copy it beside the .onnx file")
        self._found = {entry.weight.name: entry for entry in finding.find(self.proto)}
        if not self._found:
            raise InputError(
                f"`{path.name}` has no float matrix that MatMul, Gemm, Conv or Gather reads", "is it quantized already? give the float file"
            )

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(entry.weight for entry in self._found.values())

    def found(self, name: str) -> Found:
        return self._found[name]

    @property
    def opset(self) -> int:
        return max((entry.version for entry in self.proto.opset_import if entry.domain in ("", "ai.onnx")), default=1)

    def load(self, weight: Weight) -> Tensor:
        """(rows, cols) float32; non-finite values are refused by name."""
        import torch

        tensor = torch.from_numpy(self.array(self.found(weight.name).constant.tensor).astype("float32"))
        matrix = tensor.T.contiguous() if weight.transposed else tensor.reshape(weight.shape)
        if not matrix.isfinite().all():
            row, column = (~matrix.isfinite()).nonzero()[0].tolist()
            raise InputError(f"`{weight.name}` holds {matrix[row, column].item()} at row {row}, column {column}", "the file is damaged")
        return matrix

    def array(self, tensor: Any) -> Any:
        """A stored tensor as a numpy array; what lies beside the file is read from there."""
        if not external_data_helper.uses_external_data(tensor):
            return numpy_helper.to_array(tensor)
        own = onnx.TensorProto()
        own.CopyFrom(tensor)  # so that the graph in memory stays without its values
        self.fetch(own)
        return numpy_helper.to_array(own)

    def fetch(self, tensor: Any) -> None:
        """The bytes of a tensor that lies beside the file, into the tensor."""
        try:
            external_data_helper.load_external_data_for_tensor(tensor, str(self.path.parent))
        except Exception as failure:
            hint = "the file with its data belongs beside the .onnx file"
            raise InputError(f"`{tensor.name}` of `{self.path.name}` cannot be read: {failure}", hint) from failure
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the file and the files that hold its tensors."""
        digest = hashlib.sha256()
        for name in [self.path.name, *sorted(self.beside)]:
            with (self.path.parent / name).open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

    @cached_property
    def beside(self) -> frozenset[str]:
        return _beside(self.proto)


def size_of(path: Path) -> int:
    """Of the file and of those beside it that hold its tensors."""
    return sum((path.parent / name).stat().st_size for name in [path.name, *_beside(_graph_of(path))])


def _graph_of(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"there is no file `{path}`", "give an .onnx file")
    try:
        proto = onnx.load(path, load_external_data=False)
    except Exception as failure:
        raise InputError(f"`{path}` cannot be read as ONNX: {failure}", "the file is truncated or damaged; fetch it again") from failure
    if not proto.graph.node:
        raise InputError(f"`{path}` has no graph in it", "the file is truncated or damaged; fetch it again")
    return proto


def _beside(proto: Any) -> frozenset[str]:
    """Names of the files beside it that hold its tensors."""
    tensors = (tensor for _, graph in finding.graphs(proto) for tensor in graph.initializer)
    return frozenset(entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location")
