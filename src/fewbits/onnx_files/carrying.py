"""What a plan may say of an ONNX file's weights: an ONNX target that knows how the graph reads each of them."""

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
    from fewbits.activations import Activation
    from fewbits.formats import Format
    from fewbits.model import Weight
    from fewbits.onnx_files.reading import OnnxModel
    from fewbits.planning import Entry, Plan

_NEWEST_OLD_OPSET = 12  # up to here DequantizeLinear has no axis: Microsoft's is taken, which ONNX Runtime's rewrites of biases do not know
_BYTES = {TensorProto.FLOAT: 4, TensorProto.FLOAT16: 2, TensorProto.BFLOAT16: 2, TensorProto.DOUBLE: 8}


class OnnxFile(Onnx):
    """Asked for what it accepts and at what price, never to write: the file is rewritten, not made."""

    about = "a float .onnx file, its weights packed"

    def __init__(self, model: OnnxModel, accuracy_level: int = ACCURACY_LEVEL) -> None:
        super().__init__(accuracy_level)
        self._model = model

    def accepts(self, weight: Weight, fmt: Format) -> str | None:
        found = self._model.found(weight.name)
        if fmt.levels is None:
            return None if fmt.name == weight.dtype else f"what is kept stays in its own type, {weight.dtype}"
        if found.reason:
            return found.reason
        if weight.kind == "convolution":
            return qdq.refuses(fmt) and "Conv takes 8-bit weights with one scale per channel, not packed ones"
        return super().accepts(weight, fmt)

    def nbytes(self, weight: Weight, fmt: Format, activation: Activation | None = None) -> int:
        found, (rows, cols) = self._model.found(weight.name), weight.shape
        if fmt.levels is None:
            return math.prod(found.constant.shape) * _BYTES[found.constant.tensor.data_type]
        if weight.kind == "convolution":
            own = rows * cols + 4 * rows + (rows if has_zeros(fmt, activation) else 0)
            return own + (sum(s.nbytes for s in qdq.input_specs(activation).values()) if activation else 0)
        nbytes = super().nbytes(weight, fmt, activation)
        if activation or found.dtype == TensorProto.FLOAT:
            return nbytes
        return nbytes - 2 * self._scales(weight, fmt)

    def _scales(self, weight: Weight, fmt: Format) -> int:
        from fewbits.targets.onnx import storage

        return math.prod(storage.store(fmt, weight.shape, self.accuracy_level).specs()["scales"].shape)

    def accepts_activation(self, weight: Weight, fmt: Format, activation: Activation) -> str | None:
        found = self._model.found(weight.name)
        if why_not := super().accepts_activation(weight, fmt, activation):
            return why_not
        if any(use.scope for use in found.uses):
            return "it is read inside an If or a Loop, where its inputs cannot be watched"
        if found.dtype != TensorProto.FLOAT:
            return "the graph computes in float16, QuantizeLinear's scales are float"
        if self._model.opset <= _NEWEST_OLD_OPSET:
            return f"the file has opset {self._model.opset}, and scales per channel came with 13"
        return None


def has_zeros(fmt: Format, activation: Activation | None) -> bool:
    """Whether a convolution says which code is zero: int8 alone needs not, but integer products take unsigned codes (see qdq.py)."""
    return activation is not None or "zeros" in fmt.parts((256, 256))


def plan_for(
    model: OnnxModel,
    target: OnnxFile,
    format: str,
    override: Sequence[str] = (),
    method: str = "rtn",
    activation: Activation | None = None,
) -> Plan:
    """One format for all but for what an override names; static activations for every product that can take them."""
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
    """Columns that do not divide are no reason where the graph leaves no choice at all."""
    reason = model.found(entry.weight).reason
    return replace(entry, reason=f"kept: {reason}") if entry.fallback and reason else entry


def _by_rounding(entry: Entry, model: OnnxModel) -> Entry:
    """What no statistics are taken of (tables, convolutions) has nothing to choose a method by."""
    from fewbits.onnx_files import calibrating

    return replace(entry, method="rtn") if entry.method == "auto" and not calibrating.only_source(model, entry.weight) else entry


def _activated(weight: Weight, entry: Entry, target: OnnxFile, activation: Activation) -> Entry:
    if not planning.takes_activation(weight, entry):
        return entry
    if why_not := target.accepts_activation(weight, formats.get(entry.format), activation):
        return replace(entry, reason=f"{entry.reason}; inputs stay float: {why_not}")
    return replace(entry, activation=activation)


def priced(plan: Plan, model: OnnxModel, target: OnnxFile) -> Plan:
    """The same plan with what static activations change in the bytes: a weight is laid out otherwise for integers."""
    weights = {weight.name: weight for weight in model.weights}
    entries = (
        replace(e, nbytes=target.nbytes(weights[e.weight], formats.get(e.format), e.activation)) if e.activation else e
        for e in plan.entries
    )
    return replace(plan, entries=tuple(entries))
