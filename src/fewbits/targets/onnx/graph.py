"""The graph: traced without weights, then filled, so that nothing folds, copies or widens a packed weight on the way."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir
import onnxscript.optimizer
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import Tensor, nn

from fewbits import manifest
from fewbits.errors import InputError
from fewbits.targets.onnx import beside, layers

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.drafting import Draft
    from fewbits.model import Weight
    from fewbits.progress import Progress
    from fewbits.targets.onnx.beside import Array
    from fewbits.targets.onnx.storage import Store

_OPSET = 20
_TYPES = {"uint8": ir.DataType.UINT8, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16, "float32": ir.DataType.FLOAT}


class _Logits(nn.Module):
    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = of

    def forward(self, input_ids: Tensor) -> Tensor:
        # a mask of ones spares the graph 40 nodes that look for several sequences packed into one
        out = self.of(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False, return_dict=False)
        logits: Tensor = out[0]
        return logits.float()


def trace(artifact: Artifact | Draft, stores: Mapping[str, Store]) -> ir.Model:
    from fewbits.model import empty_module

    module = empty_module(artifact.config).eval()  # its memory is never touched: every large weight is replaced
    for weight in artifact.weights:
        reader = layers.replace(module.get_submodule(weight.name), stores[weight.name])
        if weight.tied_to:
            layers.share(module.get_submodule(weight.tied_to), reader)
    own: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for name in artifact.rest:
            own[name].copy_(artifact.tensor(name))
    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence")
    example = torch.zeros((2, 7), dtype=torch.long)  # sizes unlike any of the model's, and above 1: a 1 would be taken as fixed
    try:
        with _quiet(), torch.no_grad():
            program: Any = torch.onnx.export(
                _Logits(module).eval(),
                (example,),
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=_OPSET,
                input_names=["input_ids"],
                output_names=["logits"],
                dynamic_shapes=({0: batch, 1: sequence},),
            )
            model: ir.Model = program.model
            _name(model)
            for name, _ in _wanted(artifact, stores):
                model.graph.initializers[name].const_value = None  # what has no value cannot be folded
            onnxscript.optimizer.optimize_ir(model)
    except Exception as failure:
        cause = failure.__cause__ or failure  # torch.onnx wraps it in a page of advice
        reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        hint = "torch.onnx cannot trace this architecture; `--to gguf` may carry it"
        raise InputError(f"`{artifact.config.model_type}` cannot be exported to ONNX: {reason}", hint) from failure
    ClearMetadataAndDocStringPass()(model)  # stack traces hold paths of this machine
    return model


def fill(model: ir.Model, artifact: Artifact, stores: Mapping[str, Store], progress: Progress[Weight]) -> None:
    for weight in progress(artifact.weights, len(artifact.weights), "writing onnx"):
        for part, tensor in stores[weight.name].arrays(artifact.parts(weight)).items():
            name = f"{weight.name}.{part}"
            spec = stores[weight.name].specs()[part]
            assert tuple(tensor.shape) == spec.shape, name
            raw = tensor.contiguous()
            data = raw.view(torch.uint16) if raw.dtype == torch.bfloat16 else raw
            array = data.numpy()
            model.graph.initializers[name].const_value = ir.Tensor(array, _TYPES[spec.dtype], shape=ir.Shape(spec.shape), name=name)


def place(model: ir.Model, stores: Mapping[str, Store], file: str) -> tuple[Any, dict[str, Array]]:
    """The graph with its weights in a file beside it, and where they go there."""
    specs = ((f"{weight}.{part}", spec) for weight, store in stores.items() for part, spec in store.specs().items())
    placed = beside.layout(specs, file)
    with _quiet():  # it warns of every weight that has no value, and leaves it out
        proto = ir.to_proto(model)
    proto.graph.initializer.extend(array.initializer() for array in placed.values())
    return proto, placed


def fill_beside(
    path: Path, placed: Mapping[str, Array], artifact: Artifact, stores: Mapping[str, Store], progress: Progress[Weight]
) -> None:
    """One weight in memory at a time."""

    def arrays() -> Iterator[tuple[str, Tensor]]:
        for weight in progress(artifact.weights, len(artifact.weights), "writing onnx"):
            for part, tensor in stores[weight.name].arrays(artifact.parts(weight)).items():
                yield f"{weight.name}.{part}", tensor

    with path.open("wb") as stream:
        beside.write(stream, placed, arrays())


def describe(model: ir.Model, artifact: Artifact | Draft, accuracy_level: int) -> None:
    counts: dict[str, int] = {}
    for entry in artifact.plan.entries:
        counts[entry.format] = counts.get(entry.format, 0) + 1
    model.producer_name, model.producer_version = "fewbits", artifact.provenance.fewbits
    model.graph.name = artifact.config.model_type
    model.metadata_props.update(
        manifest.said(artifact.provenance, artifact.plan)
        | {
            "fewbits.plan": ", ".join(f"{count} x {name}" for name, count in sorted(counts.items())),
            "fewbits.bits_per_weight": f"{artifact.plan.bits_per_weight:.4f}",
            "fewbits.accuracy_level": str(accuracy_level),
        }
    )


def nbytes(model: ir.Model, stores: Mapping[str, Store]) -> int:
    """Of the file that this graph becomes when its weights are filled in, exactly: every one stands for its bytes, none is made."""
    pending = 0
    for weight, store in stores.items():
        for part, spec in store.specs().items():
            name = f"{weight}.{part}"
            empty = onnx.TensorProto(name=name, data_type=int(_TYPES[spec.dtype]), dims=spec.shape)
            inside = empty.ByteSize() + _prefixed(spec.nbytes)  # the bytes, their length and the tag of the field
            pending += _prefixed(inside)
    with _quiet():  # it warns of every weight that has no value yet
        proto = ir.to_proto(model)
    graph = int(proto.graph.ByteSize()) + pending
    return int(proto.ByteSize()) - _prefixed(int(proto.graph.ByteSize())) + _prefixed(graph)


def _prefixed(size: int) -> int:
    """A field of so many bytes in protobuf's encoding: one byte of tag (of fields up to 15), the length in groups of 7 bits, the bytes."""
    return 1 + max(1, -(-size.bit_length() // 7)) + size


def proto_of(model: ir.Model) -> Any:
    return ir.to_proto(model)


def save(proto: Any, path: Path) -> None:
    path.write_bytes(proto.SerializeToString(deterministic=True))
    onnx.checker.check_model(_without_arrays_beside(proto) or path)  # operators of com.microsoft are unknown to it and skipped


def _without_arrays_beside(proto: Any) -> Any | None:
    """The graph with inputs in place of the arrays that lie beside it, which do not have their names yet; None: it has none."""
    outside = [tensor for tensor in proto.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    if not outside:
        return None
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    kept = [tensor for tensor in proto.graph.initializer if tensor.data_location != onnx.TensorProto.EXTERNAL]
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(kept)
    bare.graph.input.extend(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims) for tensor in outside)
    return bare


def _wanted(artifact: Artifact | Draft, stores: Mapping[str, Store]) -> Iterator[tuple[str, Weight]]:
    for weight in artifact.weights:
        for part in stores[weight.name].specs():
            yield f"{weight.name}.{part}", weight


def _name(model: ir.Model) -> None:
    """Parameters by their own names, without that of the wrapper."""
    for value in list(model.graph.initializers.values()):
        assert value.name
        value.name = value.name.removeprefix("of.")


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.onnx warns of what it leaves out (torchvision) and of its own deprecations; nothing a person could act on."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
