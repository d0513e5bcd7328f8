"""An ONNX target that knows how the graph reads each weight, and the plans for such a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from onnx import TensorProto

from fewbits import formats, planning
from fewbits.errors import InputError
from fewbits.targets.onnx import ACCURACY_LEVEL, Onnx, qdq

if TYPE_CHECKING:
    from fewbits.formats import Format
    from fewbits.formats.runtime.activations import Activation
    from fewbits.model.onnx.graph import OnnxModel
    from fewbits.model.weights import Weight
    from fewbits.planning import Entry, Plan

_NEWEST_OLD_OPSET = 12  # up to here DequantizeLinear has no axis; Microsoft's has, but ONNX Runtime does not fuse biases with it
_BYTES = {TensorProto.FLOAT: 4, TensorProto.FLOAT16: 2, TensorProto.BFLOAT16: 2, TensorProto.DOUBLE: 8}


class OnnxFile(Onnx):
    """Answers what can be stored and in how many bytes. It writes nothing: the graph is rewritten by rewrite.py."""

    about = "a float .onnx file, its weights packed"

    def __init__(self, model: OnnxModel, accuracy_level: int = ACCURACY_LEVEL) -> None:
        super().__init__(accuracy_level)
        self._model = model

    def accepts(self, weight: Weight, fmt: Format) -> str | None:
        in_graph = self._model.graph_weight(weight.name)
        if fmt.is_cast:
            return None if fmt.name == weight.dtype else f"what is kept stays in its own type, {weight.dtype}"
        if in_graph.reason:
            return in_graph.reason
        if weight.kind == "convolution":
            return qdq.refuses(fmt) and "Conv takes 8-bit weights with one scale per channel, not packed ones"
        return super().accepts(weight, fmt)

    def nbytes(self, weight: Weight, fmt: Format, activation: Activation | None = None) -> int:
        in_graph, (rows, cols) = self._model.graph_weight(weight.name), weight.shape
        if fmt.is_cast:
            return math.prod(in_graph.constant.shape) * _BYTES[in_graph.constant.tensor.data_type]
        if weight.kind == "convolution":
            nbytes = rows * cols + 4 * rows + (rows if has_zeros(fmt, activation) else 0)
            return nbytes + (sum(s.nbytes for s in qdq.input_specs(activation).values()) if activation else 0)
        nbytes = super().nbytes(weight, fmt, activation)
        if activation or in_graph.dtype == TensorProto.FLOAT:
            return nbytes
        return nbytes - 2 * self._scales(weight, fmt)

    def _scales(self, weight: Weight, fmt: Format) -> int:
        from fewbits.targets.onnx import storage

        return math.prod(storage.store(fmt, weight.shape, self.accuracy_level).specs()["scales"].shape)

    def accepts_activation(self, weight: Weight, fmt: Format, activation: Activation) -> str | None:
        in_graph = self._model.graph_weight(weight.name)
        if why_not := super().accepts_activation(weight, fmt, activation):
            return why_not
        if any(use.scope for use in in_graph.uses):
            return "it is read inside an If or a Loop, where its inputs cannot be watched"
        if in_graph.dtype != TensorProto.FLOAT:
            return "the graph computes in float16, QuantizeLinear's scales are float"
        if self._model.opset <= _NEWEST_OLD_OPSET:
            return f"the file has opset {self._model.opset}, and scales per channel came with 13"
        return None


def has_zeros(fmt: Format, activation: Activation | None) -> bool:
    """Whether the code of zero is stored for a convolution: not for int8 alone, but integer products take unsigned codes (see qdq.py)."""
    return activation is not None or "zeros" in fmt.parts((256, 256))


def plan_for(
    model: OnnxModel,
    target: OnnxFile,
    format: str,
    override: Sequence[str] = (),
    method: str = "rtn",
    activation: Activation | None = None,
) -> Plan:
    """One format for all weights but those that an override names; static activations for every product that can take them."""
    plan = planning.uniform(model.weights, target, formats.get(format), override, method)
    plan = replace(plan, entries=tuple(_by_rounding(_explained(entry, model), model) for entry in plan.entries))
    if activation is None:
        return plan
    weights = {weight.name: weight for weight in model.weights}
    plan = replace(plan, entries=tuple(_activated(weights[entry.weight], entry, target, activation) for entry in plan.entries))
    if not plan.activations:
        why_not = next((f": {entry.reason}" for entry in plan.entries if "inputs stay float" in entry.reason), "")
        raise InputError(f"no weight's input can be rounded to {activation.name}{why_not}", "use `--format int8_channel`")
    return plan


def _explained(entry: Entry, model: OnnxModel) -> Entry:
    """Where the graph rules out any format, that is the reason, not the columns that do not divide."""
    reason = model.graph_weight(entry.weight).reason
    return replace(entry, reason=f"kept: {reason}") if entry.fallback and reason else entry


def _by_rounding(entry: Entry, model: OnnxModel) -> Entry:
    """Weights without statistics (tables, convolutions) are rounded to nearest."""
    from fewbits.onnx_graphs import statistics

    return replace(entry, method="rtn") if entry.method == "auto" and not statistics.only_source(model, entry.weight) else entry


def _activated(weight: Weight, entry: Entry, target: OnnxFile, activation: Activation) -> Entry:
    if not planning.takes_activation(weight, entry):
        return entry
    if why_not := target.accepts_activation(weight, formats.get(entry.format), activation):
        return replace(entry, reason=f"{entry.reason}; inputs stay float: {why_not}")
    return replace(entry, activation=activation)


def priced(plan: Plan, model: OnnxModel, target: OnnxFile) -> Plan:
    """The same plan with its sizes: static activations change the layout of weights."""
    weights = {weight.name: weight for weight in model.weights}
    entries = (
        replace(e, nbytes=target.nbytes(weights[e.weight], formats.get(e.format), e.activation)) if e.activation else e
        for e in plan.entries
    )
    return replace(plan, entries=tuple(entries))
