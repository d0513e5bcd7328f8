"""An .onnx file: its graph in memory, its tensors in files beside it read one at a time when asked for."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
from onnx import external_data_helper, numpy_helper

from fewbits.errors import InputError
from fewbits.model.onnx import constants
from fewbits.model.onnx.inline_data import read as without_values
from fewbits.store.untrusted import first_line, inside

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.model.onnx.constants import GraphWeight
    from fewbits.model.weights import Weight


_TWO_SIDES = {"MatMul", "Gemm", "Conv", "Gather"}
_DAMAGED = "the file is truncated or damaged; fetch it again"


class OnnxModel:
    rest: tuple[str, ...] = ()  # everything else in the graph stays as it is

    def __init__(self, path: Path) -> None:
        self.path = path
        self.proto = _graph_of(path)
        _check_nodes(path, self.proto)
        _check_beside(path, self.beside)
        try:
            self._weights = {entry.weight.name: entry for entry in constants.find(self.proto)}
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as failure:
            raise InputError(f"the graph of `{path.name}` contradicts itself: {failure!r}", _DAMAGED) from failure
        if not self._weights:
            raise InputError(
                f"`{path.name}` has no float matrix that MatMul, Gemm, Conv or Gather reads", "is it quantized already? give the float file"
            )

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(entry.weight for entry in self._weights.values())

    def graph_weight(self, name: str) -> GraphWeight:
        return self._weights[name]

    @property
    def opset(self) -> int:
        return max((entry.version for entry in self.proto.opset_import if entry.domain in ("", "ai.onnx")), default=1)

    def load(self, weight: Weight) -> Tensor:
        """(rows, cols) float32; non-finite values are refused by name."""
        import torch

        tensor = torch.from_numpy(self.array(self.graph_weight(weight.name).constant.tensor).astype("float32"))
        matrix = tensor.T.contiguous() if weight.transposed else tensor.reshape(weight.shape)
        if not matrix.isfinite().all():
            row, column = (~matrix.isfinite()).nonzero()[0].tolist()
            raise InputError(f"`{weight.name}` holds {matrix[row, column].item()} at row {row}, column {column}", "the file is damaged")
        return matrix

    def array(self, tensor: Any) -> Any:
        """A stored tensor as a numpy array, read from the file beside the graph if it is there."""
        if external_data_helper.uses_external_data(tensor):
            copied = onnx.TensorProto()
            copied.CopyFrom(tensor)  # so that the graph in memory stays without its values
            self.fetch(copied)
            tensor = copied
        return array_of(tensor, self.path)

    def fetch(self, tensor: Any) -> None:
        """Reads the bytes of a tensor from the file beside the graph into the tensor."""
        try:
            external_data_helper.load_external_data_for_tensor(tensor, str(self.path.parent))
        except Exception as failure:
            hint = "the file with its data belongs beside the .onnx file"
            raise InputError(f"`{tensor.name}` of `{self.path.name}` cannot be read: {failure}", hint) from failure
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the file and the files beside it."""
        digest = hashlib.sha256()
        for name in [self.path.name, *sorted(self.beside)]:
            with (self.path.parent / name).open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

    @cached_property
    def beside(self) -> frozenset[str]:
        return _beside(self.proto)


def array_of(tensor: Any, path: Path) -> Any:
    """A tensor whose bytes are in memory, as a numpy array. Its shape and type may contradict its bytes in many ways."""
    if any(size < 0 for size in tensor.dims):
        raise InputError(f"`{tensor.name}` of `{path.name}` has the shape {tuple(tensor.dims)}", _DAMAGED)
    try:
        return numpy_helper.to_array(tensor)
    except Exception as failure:
        said = f"`{tensor.name}` of `{path.name}` is not what it says: {first_line(failure)}"
        raise InputError(said, _DAMAGED) from failure


def check_graph(path: Path) -> None:
    """Checks, before native code opens a file, that it can be parsed and has all its tensors in its folder."""
    proto = _graph_of(path, values=False)
    _check_nodes(path, proto)
    _check_beside(path, _beside(proto))


def size_of(path: Path) -> int:
    """Bytes of the file and of those beside it that hold its tensors."""
    return sum((path.parent / name).stat().st_size for name in [path.name, *_beside(_graph_of(path, values=False))])


def _graph_of(path: Path, values: bool = True) -> Any:
    if not path.is_file():
        raise InputError(f"there is no file `{path}`", "give an .onnx file")
    try:
        proto = without_values(path)  # first, because it refuses a huge graph before that takes memory
        proto = onnx.load(path, load_external_data=False) if values else proto
    except Exception as failure:
        raise InputError(f"`{path}` cannot be read as ONNX: {failure}", _DAMAGED) from failure
    if not proto.graph.node:
        raise InputError(f"`{path}` has no graph in it", _DAMAGED)
    return proto


def _check_nodes(path: Path, proto: Any) -> None:
    """Every node has an output, which names it, and a product has two operands: all code that walks a graph relies on it."""
    for _, graph in constants.graphs(proto):
        for node in graph.node:
            if not node.output or (node.op_type in _TWO_SIDES and len(node.input) < 2):
                raise InputError(f"a {node.op_type} of `{path.name}` has no output, or too few inputs", _DAMAGED)


def _check_beside(path: Path, names: frozenset[str]) -> None:
    """The files exist, in the folder of the graph: an untrusted graph must not make us read other files."""
    for name in sorted(names):
        if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise InputError(f"`{path.name}` keeps tensors outside its folder, in `{name}`", "do not trust this file")
        if not inside(path.parent, path.parent / name).is_file():
            raise InputError(f"`{path.name}` keeps tensors in `{name}`, which is not there", "copy it beside the .onnx file")


def _beside(proto: Any) -> frozenset[str]:
    """Names of the files beside the graph that hold its tensors."""
    tensors = (tensor for _, graph in constants.graphs(proto) for tensor in graph.initializer)
    return frozenset(entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location")
