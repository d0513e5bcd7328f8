"""What flows into each product when the float file runs: scales for static activations, and statistics that methods choose codes by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import onnx

from fewbits import formats, methods, planning
from fewbits.errors import InputError
from fewbits.onnx_files import finding
from fewbits.progress import silent

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.activations import Activation
    from fewbits.calibration.histogram import Histogram
    from fewbits.calibration.recording import Site
    from fewbits.calibration.statistics import WeightStatistics
    from fewbits.onnx_files.inputs import Inputs, Sample
    from fewbits.onnx_files.reading import OnnxModel
    from fewbits.planning import Plan
    from fewbits.progress import Progress

    Values = dict[str, Tensor]

MEMORY = 1 << 30  # bytes of second moments
_RANGE = "mse"


def needs_ranges(plan: Plan) -> bool:
    return any(activation.static and activation.scale is None for activation in plan.activations.values())


def needs_statistics(plan: Plan) -> bool:
    return any(methods.get(entry.method).needs_statistics and formats.get(entry.format).levels is not None for entry in plan.entries)


def with_ranges(model: OnnxModel, plan: Plan, inputs: Inputs, progress: Progress[Sample]) -> Plan:
    """The same plan with the scale of every static activation."""
    from fewbits.calibration.histogram import Histogram

    if not inputs.real:
        raise InputError("static activations need inputs to calibrate with", "give them as a .npz with `--data`")
    wanted = {name: activation for name, activation in plan.activations.items() if activation.scale is None}
    sources = {name: _sources(model, name) for name in wanted}
    seen = {value: Histogram() for value in sorted({value for values in sources.values() for value in values})}
    for found, _ in _flowing(model, list(seen), inputs, progress):
        for value, histogram in seen.items():
            histogram.add(found[value])
    chosen = {}
    for name, activation in wanted.items():
        histogram = Histogram()  # of all its readers' inputs: they share the scale
        for value in sources[name]:
            histogram.merge(seen[value])
        chosen[name] = _ranged(activation, histogram)
    return planning.with_activations(plan, chosen)


class Statistics:
    """Of the inputs of products, with second moments, as many at a time as fit the memory: the file is run again for the next ones."""

    def __init__(self, model: OnnxModel, plan: Plan, inputs: Inputs, progress: Progress[Sample], memory: int = MEMORY) -> None:
        self._model, self._inputs = model, inputs
        self._source: dict[str, str] = {}  # by weight
        self._cols: dict[str, int] = {}  # by value
        for weight in model.weights:
            quantized = formats.get(plan[weight.name].format).levels is not None
            if quantized and methods.get(plan[weight.name].method).needs_statistics and (value := only_source(model, weight.name)):
                self._source[weight.name] = value
                self._cols[value] = weight.shape[1]
        self._groups = _groups(self._cols, memory)
        self._held = self._recorded(self._groups[0], progress)  # here and not when first asked for: one bar at a time

    def of(self, weight: str) -> WeightStatistics | None:
        from fewbits.calibration.statistics import WeightStatistics

        value = self._source.get(weight)
        if value is None:
            return None
        if value not in self._held:
            self._held = self._recorded(next(group for group in self._groups if value in group), silent)
        return WeightStatistics(self._held[value].finished())

    def _recorded(self, values: Sequence[str], progress: Progress[Sample]) -> dict[str, Site]:
        from fewbits.calibration.recording import Site

        sites = {value: Site([], self._cols[value], hessian=True) for value in values}
        for found, index in _flowing(self._model, values, self._inputs, progress) if values else ():
            for value, site in sites.items():
                _record(site, found[value], index % 2)
        return sites


def _record(site: Site, x: Tensor, half: int) -> None:
    """A matrix is a batch of inputs; with more axes, the last but one counts positions."""
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
    """The values that it is multiplied with."""
    return sorted({use.node.input[0] for use in model.found(weight).uses})


def only_source(model: OnnxModel, weight: str) -> str | None:
    """The value whose last axis goes with the weight's columns, where there is one that can be watched. A table that is multiplied too
    has none: what its lookups need is not known."""
    uses = model.found(weight).uses
    alike = all(use.reading == "linear" and not use.scope and not finding.attribute(use.node, "transA", 0) for use in uses)
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
            found = session.run(inner, dict(sample)) if inner else []
        except Exception as failure:
            reason = str(failure).strip().splitlines()[0]
            raise InputError(f"the file cannot be run on {inputs.about}: {reason}", "give its inputs as a .npz with `--data`") from failure
        named = dict(zip(inner, found, strict=True)) | {value: sample[value] for value in values if value in sample}
        yield {value: torch.from_numpy(array).float() for value, array in named.items()}, index


def _watching(model: OnnxModel, values: list[str]) -> Any:
    """A session that also gives these values out."""
    from fewbits.onnx_files import verifying

    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    given = {entry.name for entry in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=value) for value in values if value not in given)
    return verifying.session(proto.SerializeToString(), model.path)


def _ranged(activation: Activation, histogram: Histogram) -> Activation:
    """What is never negative (after a Relu) gets all 256 codes, from zero up."""
    from fewbits import ranges
    from fewbits.calibration.histogram import HALF

    if activation.format == "int8" and not bool(histogram.counts[:HALF].any()):
        activation = replace(activation, symmetric=False)
    levels = ranges.LEVELS[activation.format if activation.symmetric else f"{activation.format}_asymmetric"]
    found = ranges.estimate(activation.range or _RANGE, histogram, levels)
    return activation.calibrated(found.low, found.high)
