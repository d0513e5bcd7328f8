"""Every weight by its plan, one after the other: all from the float model's statistics, or block by block after the quantized ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fewbits import formats, kernels, methods
from fewbits.methods import Outcome
from fewbits.rewrites.bias import corrected_bias

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.calibration.statistics import WeightStatistics
    from fewbits.model import Model, Weight
    from fewbits.planning import Plan
    from fewbits.progress import Progress


class Known(Protocol):
    """Whatever knows the statistics of weights; None: nothing is known of this one."""

    def of(self, weight: str) -> WeightStatistics | None: ...


Stream = Iterator[tuple["Weight", "Outcome"]]


def independent(model: Model, plan: Plan, statistics: Known | None, progress: Progress[Any]) -> Stream:
    """No weight knows of another's errors: any order gives the same codes."""
    for weight in progress(model.weights, len(model.weights), "quantizing"):
        yield weight, _quantized(model, plan, weight, statistics.of(weight.name) if statistics else None)


def sequential(
    model: Model, plan: Plan, statistics: Known, samples: Sequence[Sequence[int]], memory: int, progress: Progress[Any]
) -> Stream:
    """A block's inputs are taken after the blocks before it were quantized, so that it is fitted to what it will really read."""
    from fewbits.blocks import Blocks
    from fewbits.calibration.sequential import Sequential, with_inputs

    blocks = Blocks(model)
    with tempfile.TemporaryDirectory(prefix="fewbits-") as scratch:
        walk = Sequential(blocks, samples, Path(scratch), memory)
        for weight in blocks.outer_weights:
            yield weight, _quantized(model, plan, weight, statistics.of(weight.name))
        for index in progress(range(len(blocks)), len(blocks), "quantizing, block by block"):
            inputs, decoded = walk.inputs(index), {}
            for weight in blocks.weights(index):
                known = statistics.of(weight.name)
                outcome = _quantized(model, plan, weight, known and with_inputs(known, inputs.get(weight.name)))
                decoded[weight.name] = kernels.decode(formats.get(plan[weight.name].format), outcome.parts, weight.shape)
                yield weight, outcome
            walk.advance(index, decoded)


class Stored(Mapping[str, Outcome]):
    """What an artifact holds, as it was chosen; a weight's parts are read when asked for."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._weights = {weight.name: weight for weight in artifact.weights}

    def __getitem__(self, name: str) -> Outcome:
        how: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in self._artifact.outcomes[name].items()
        }
        bias = f"{name}.bias"
        own = self._artifact.tensor(bias) if bias in self._artifact.rest else None
        return Outcome(self._artifact.parts(self._weights[name]), **how, bias=own)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _quantized(model: Model, plan: Plan, weight: Weight, known: WeightStatistics | None) -> Outcome:
    entry, fmt, w = plan[weight.name], formats.get(plan[weight.name].format), model.load(weight)
    outcome = methods.get(entry.method).quantize(w, fmt, known)
    name = f"{weight.name}.bias"
    if fmt.levels is None or known is None or known.input is None or not known.input.count.sum() or name not in model.rest:
        return outcome
    decoded = kernels.decode(fmt, outcome.parts, weight.shape)
    return replace(outcome, bias=corrected_bias(model.tensor(name), w, decoded, known.input.later_mean()))
