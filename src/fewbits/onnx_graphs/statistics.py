"""A float file and its inputs in; scales of static activations and the statistics by which methods choose codes out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import onnx

from fewbits import formats, methods, planning
from fewbits.errors import InputError
from fewbits.model.onnx import constants
from fewbits.progress import silent

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.calibration.histogram import Histogram
    from fewbits.calibration.recorders import Site
    from fewbits.calibration.statistics import WeightStatistics
    from fewbits.formats.runtime.activations import Activation
    from fewbits.model.onnx.graph import OnnxModel
    from fewbits.onnx_graphs.inputs import Inputs, Sample
    from fewbits.planning import Plan
    from fewbits.progress import Progress

    Values = dict[str, Tensor]

MEMORY = 1 << 30  # bytes of second moments
_RANGE = "mse"


def needs_ranges(plan: Plan) -> bool:
    return any(activation.static and activation.scale is None for activation in plan.activations.values())


def needs_statistics(plan: Plan) -> bool:
    return any(methods.get(entry.method).needs_statistics and not formats.get(entry.format).is_cast for entry in plan.entries)


def with_ranges(model: OnnxModel, plan: Plan, inputs: Inputs, progress: Progress[Sample]) -> Plan:
    """The same plan with the scale of every static activation."""
    from fewbits.calibration.histogram import Histogram

    if not inputs.real:
        raise InputError("static activations need inputs to calibrate with", "give them as a .npz with `--data`")
    wanted = {name: activation for name, activation in plan.activations.items() if activation.scale is None}
    sources = {name: _sources(model, name) for name in wanted}
    seen = {value: Histogram() for value in sorted({value for read in sources.values() for value in read})}
    for values, _ in _flowing(model, list(seen), inputs, progress):
        for value, histogram in seen.items():
            histogram.add(values[value])
    chosen = {}
    for name, activation in wanted.items():
        histogram = Histogram()  # over the inputs of all nodes that read the weight: they share the scale
        for value in sources[name]:
            histogram.merge(seen[value])
        chosen[name] = _ranged(activation, histogram)
    return planning.with_activations(plan, chosen)


class Statistics:
    """Statistics of the inputs of matrix products. Second moments are collected for as many inputs as fit the memory; the file is run again
    for the next ones."""

    def __init__(self, model: OnnxModel, plan: Plan, inputs: Inputs, progress: Progress[Sample], memory: int = MEMORY) -> None:
        self._model, self._inputs = model, inputs
        self._source: dict[str, str] = {}  # by weight
        self._cols: dict[str, int] = {}  # by value
        for weight in model.weights:
            quantized = not formats.get(plan[weight.name].format).is_cast
            if quantized and methods.get(plan[weight.name].method).needs_statistics and (value := only_source(model, weight.name)):
                self._source[weight.name] = value
                self._cols[value] = weight.shape[1]
        self._groups = _groups(self._cols, memory)
        self._held = self._recorded(self._groups[0], progress)  # now, not when first asked for: two progress bars must not overlap

    def of(self, weight: str) -> WeightStatistics | None:
        from fewbits.calibration.statistics import WeightStatistics

        value = self._source.get(weight)
        if value is None:
            return None
        if value not in self._held:
            self._held = self._recorded(next(group for group in self._groups if value in group), silent)
        return WeightStatistics(self._held[value].finished())

    def _recorded(self, values: Sequence[str], progress: Progress[Sample]) -> dict[str, Site]:
        from fewbits.calibration.recorders import Site

        sites = {value: Site([], self._cols[value], hessian=True) for value in values}
        for arrays, index in _flowing(self._model, values, self._inputs, progress) if values else ():
            for value, site in sites.items():
                _record(site, arrays[value], index % 2)
        return sites


def _record(site: Site, x: Tensor, half: int) -> None:
    """Rows of a matrix are independent inputs; with more axes, the last but one is the position."""
    import torch

    if x.dim() > 2 and x.shape[-2] > 1:
        site.add(x.reshape(-1, *x.shape[-2:]), half)
    else:
        tokens = x.reshape(-1, x.shape[-1])
        site.add_tokens(tokens, torch.zeros(len(tokens), dtype=torch.bool), half, 1)


def _groups(cols: dict[str, int], memory: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    taken = 0
    for value, count in cols.items():
        size = 2 * 4 * count * count
        if groups[-1] and taken + size > memory:
            groups.append([])
            taken = 0
        groups[-1].append(value)
        taken += size
    return groups


def _sources(model: OnnxModel, weight: str) -> list[str]:
    """The values of the graph that it is multiplied with."""
    return sorted({use.node.input[0] for use in model.graph_weight(weight).uses})


def only_source(model: OnnxModel, weight: str) -> str | None:
    """The one value that is multiplied with the weight, its last axis with the weight's columns; None: there are several, or it is inside
    an If or a Loop, or the weight is looked up too, for which statistics say nothing."""
    uses = model.graph_weight(weight).uses
    alike = all(use.reading == "linear" and not use.scope and not constants.attribute(use.node, "transA", 0) for use in uses)
    values = _sources(model, weight)
    return values[0] if alike and len(values) == 1 else None


def _flowing(
    model: OnnxModel, values: Sequence[str], inputs: Inputs, progress: Progress[Sample]
) -> Iterator[tuple[dict[str, Tensor], int]]:
    """These values of the graph, sample by sample, and the sample's number."""
    import torch

    inner = [value for value in values if value not in inputs.samples[0]]
    session = _watching(model, inner)
    for index, sample in enumerate(progress(inputs.samples, len(inputs.samples), "calibrating")):
        try:
            arrays = session.run(inner, dict(sample)) if inner else []
        except Exception as failure:
            reason = str(failure).strip().splitlines()[0]
            raise InputError(f"the file cannot be run on {inputs.about}: {reason}", "give its inputs as a .npz with `--data`") from failure
        named = dict(zip(inner, arrays, strict=True)) | {value: sample[value] for value in values if value in sample}
        yield {value: torch.from_numpy(array).float() for value, array in named.items()}, index


def _watching(model: OnnxModel, values: list[str]) -> Any:
    """A session that has these values as outputs too."""
    from fewbits.onnx_graphs import outputs

    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    given = {entry.name for entry in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=value) for value in values if value not in given)
    return outputs.session(proto.SerializeToString(), model.path)


def _ranged(activation: Activation, histogram: Histogram) -> Activation:
    """Inputs that are never negative (after a Relu) get all 256 codes, from zero up."""
    from fewbits.calibration import ranges
    from fewbits.calibration.histogram import HALF

    if activation.format == "int8" and not bool(histogram.counts[:HALF].any()):
        activation = replace(activation, symmetric=False)
    levels = ranges.LEVELS[activation.format if activation.symmetric else f"{activation.format}_asymmetric"]
    span = ranges.estimate(activation.range or _RANGE, histogram, levels)
    return activation.calibrated(span.low, span.high)
