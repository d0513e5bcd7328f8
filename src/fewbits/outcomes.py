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
    from fewbits.calibration.statistics import InputStatistics, WeightStatistics
    from fewbits.model import Model, Weight
    from fewbits.planning import Plan
    from fewbits.progress import Progress


class Known(Protocol):
    """Whatever knows the statistics of weights; None: nothing is known of this one."""

    def of(self, weight: str) -> WeightStatistics | None: ...


_UNSEEN = "calibration saw none of its inputs: rounded without them"  # an expert that was never chosen, a convolution in groups
Stream = Iterator[tuple["Weight", "Outcome"]]


def independent(model: Model, plan: Plan, statistics: Known | None, progress: Progress[Any], earlier: Artifact | None = None) -> Stream:
    """No weight knows of another's errors: any order gives the same codes, and what `earlier` holds in the same format is the same."""
    known = Stored(earlier) if earlier else {}
    for weight in progress(model.weights, len(model.weights), "quantizing"):
        if earlier and all(getattr(earlier.plan[weight.name], key) == getattr(plan[weight.name], key) for key in ("format", "method")):
            yield weight, known[weight.name]
        else:
            yield weight, _quantized(model, plan, weight, statistics)


def sequential(
    model: Model, plan: Plan, statistics: Known, samples: Sequence[Sequence[int]], memory: int, progress: Progress[Any]
) -> Stream:
    """A block's inputs are taken after the blocks before it were quantized, so that it is fitted to what it will really read."""
    from fewbits.blocks import Blocks
    from fewbits.calibration.sequential import Sequential

    blocks = Blocks(model)
    with tempfile.TemporaryDirectory(prefix="fewbits-") as scratch:
        walk = Sequential(blocks, samples, Path(scratch), memory)
        for weight in blocks.outer_weights:
            yield weight, _quantized(model, plan, weight, statistics)
        for index in progress(range(len(blocks)), len(blocks), "quantizing, block by block"):
            inputs, decoded = walk.inputs(index), {}
            for weight in blocks.weights(index):
                outcome = _quantized(model, plan, weight, statistics, inputs.get(weight.name))
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


def _quantized(model: Model, plan: Plan, weight: Weight, statistics: Known | None, seen: InputStatistics | None = None) -> Outcome:
    """`seen`: its inputs as they are now, in place of those that the statistics hold."""
    entry, fmt, w = plan[weight.name], formats.get(plan[weight.name].format), model.load(weight)
    known = statistics.of(weight.name) if statistics else None
    if known is not None and seen is not None and seen.tokens():
        known = replace(known, input=seen)
    method = methods.get(entry.method)
    if statistics and method.needs_statistics and fmt.levels is not None and not (known and known.has_importance):
        return replace(methods.get("rtn").quantize(w, fmt), notes=(_UNSEEN,))
    outcome = method.quantize(w, fmt, known)
    name = f"{weight.name}.bias"
    if fmt.levels is None or known is None or known.input is None or not known.input.count.sum() or name not in model.rest:
        return outcome
    decoded = kernels.decode(fmt, outcome.parts, weight.shape)
    return replace(outcome, bias=corrected_bias(model.tensor(name), w, decoded, known.input.later_mean()))
