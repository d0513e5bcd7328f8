"""The graph of a model, traced without weights, so that no optimization folds, copies or widens a packed weight."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir
import onnxscript.optimizer
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import Tensor, nn

from fewbits.artifact import manifest
from fewbits.errors import InputError
from fewbits.model.onnx import external_data
from fewbits.targets.onnx import layers, storage

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.artifact.draft import Draft
    from fewbits.formats import Spec

_OPSET = 20


class _Logits(nn.Module):
    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = of

    def forward(self, input_ids: Tensor) -> Tensor:
        # a mask of ones spares the graph 40 nodes that look for several sequences packed into one
        out = self.of(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False, return_dict=False)
        logits: Tensor = out[0]
        return logits.float()


def trace(artifact: Artifact | Draft, stores: Mapping[str, storage.Store]) -> ir.Model:
    from fewbits.model.module import empty_module

    module = empty_module(artifact.config).eval()  # its memory is never touched, since every large weight is replaced
    for weight in artifact.weights:
        reader = layers.replace(module.get_submodule(weight.name), stores[weight.name])
        if weight.tied_to:
            layers.share(module.get_submodule(weight.tied_to), reader)
    tensors: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for name in artifact.rest:
            tensors[name].copy_(artifact.tensor(name))
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
            for name in storage.specs(stores):
                model.graph.initializers[name].const_value = None  # without a value it cannot be folded
            onnxscript.optimizer.optimize_ir(model)
    except Exception as failure:
        cause = failure.__cause__ or failure  # torch.onnx wraps it in a page of advice
        reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        hint = "torch.onnx cannot trace this architecture; `--to gguf` may carry it"
        raise InputError(f"`{artifact.config.model_type}` cannot be exported to ONNX: {reason}", hint) from failure
    ClearMetadataAndDocStringPass()(model)  # stack traces hold paths of this machine
    _check_lengths(model, artifact.config.model_type)
    return model


def _check_lengths(model: ir.Model, model_type: str) -> None:
    """An error if the trace took the length of its example for the only one: torch.onnx says no word of it."""
    for value in (*model.graph.inputs, *model.graph.outputs[:1]):
        fixed = [dim for dim in tuple(value.shape or ())[:2] if isinstance(dim, int)]
        if fixed:
            sizes = " x ".join(str(dim) if isinstance(dim, int) else str(dim.value) for dim in value.shape or ())
            reason = f"the trace fixed `{value.name}` to {sizes}, and would fit no other text"
            raise InputError(f"`{model_type}` cannot be exported to ONNX: {reason}", "`--to gguf` may carry it")


def describe(model: ir.Model, artifact: Artifact | Draft, accuracy_level: int) -> None:
    model.producer_name, model.producer_version = "fewbits", artifact.provenance.fewbits
    model.graph.name = artifact.config.model_type
    about = manifest.graph_metadata(artifact.provenance, artifact.plan)
    model.metadata_props.update(about | {"fewbits.accuracy_level": str(accuracy_level)})


def proto_of(model: ir.Model, wanted: Mapping[str, Spec]) -> Any:
    """The graph without the arrays of weights, checked as if they were inputs."""
    with _quiet():  # it warns of every weight that has no value, and leaves it out
        proto = ir.to_proto(model)
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    bare.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, external_data.TYPES[spec.dtype], spec.shape) for name, spec in wanted.items()
    )
    onnx.checker.check_model(bare)  # operators of com.microsoft are unknown to it and skipped
    return proto


def _name(model: ir.Model) -> None:
    """Removes the name of the wrapper from those of parameters."""
    for value in list(model.graph.initializers.values()):
        assert value.name
        value.name = value.name.removeprefix("of.")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of torch.onnx about torchvision and deprecations, on which a user cannot act."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
