"""Every weight by its plan, one after the other: all from the float model's statistics, or block by block after the quantized ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fewbits import formats, kernels, methods
from fewbits.kept import hash_of
from fewbits.methods import Outcome
from fewbits.progress import say
from fewbits.rewrites.bias import corrected_bias

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.calibration.statistics import InputStatistics, WeightStatistics
    from fewbits.kept import Kept, Result
    from fewbits.model import Model, Weight
    from fewbits.planning import Plan
    from fewbits.progress import Progress


class Known(Protocol):
    """Whatever knows the statistics of weights; None: nothing is known of this one."""

    def of(self, weight: str) -> WeightStatistics | None: ...


_UNSEEN = "calibration saw none of its inputs: rounded without them"  # an expert that was never chosen, a convolution in groups
Stream = Iterator[tuple["Weight", "Outcome"]]


def independent(model: Model, plan: Plan, statistics: Known | None, progress: Progress[Any], kept: Kept | None = None) -> Stream:
    """No weight knows of another's errors: any order gives the same codes, and one that was quantized before in the same format by the
    same method is the same. `kept` tells apart models and statistics."""
    own = {weight.name: _parameters(plan, weight) for weight in model.weights}
    if found := sum(kept.has("weight", **each) for each in own.values()) if kept else 0:
        say(progress, f"going on: {found} of {len(own)} weights were there")
    for weight in progress(model.weights, len(model.weights), "quantizing"):
        done = kept.find("weight", **own[weight.name]) if kept else None
        outcome = restored(done) if done else _quantized(model, plan, weight, statistics)
        if kept and not done:
            keep(kept, "weight", outcome, **own[weight.name])
        yield weight, outcome


def sequential(
    model: Model,
    plan: Plan,
    statistics: Known,
    samples: Sequence[Sequence[int]],
    memory: int,
    progress: Progress[Any],
    kept: Kept | None = None,
) -> Stream:
    """A block's inputs are taken after the blocks before it were quantized, so that it is fitted to what it will really read.

    The hidden states are not kept: a run that goes on takes them through the blocks that are done, a small part of what each cost.
    """
    from fewbits.blocks import Blocks
    from fewbits.calibration.sequential import Sequential

    blocks = Blocks(model)
    with kept.scratch() if kept else tempfile.TemporaryDirectory(prefix="fewbits-") as scratch:
        walk = Sequential(blocks, samples, Path(scratch), memory)
        for weight in blocks.outer_weights:
            yield weight, _quantized(model, plan, weight, statistics)
        before = hash_of(samples)  # all that the inputs of a block depend on
        for index in progress(range(len(blocks)), len(blocks), "quantizing, block by block"):
            weights, decoded = blocks.weights(index), {}
            inputs: Mapping[str, InputStatistics] | None = None  # taken when a weight asks for them
            for weight in weights:
                own = _parameters(plan, weight) | {"before": before}
                done = kept.find("weight", **own) if kept else None
                if done is None and inputs is None:
                    inputs = walk.inputs(index)
                outcome = restored(done) if done else _quantized(model, plan, weight, statistics, (inputs or {}).get(weight.name))
                if kept and not done:
                    keep(kept, "weight", outcome, **own)
                decoded[weight.name] = kernels.decode(formats.get(plan[weight.name].format), outcome.parts, weight.shape)
                yield weight, outcome
            before = hash_of([before, [_parameters(plan, weight) for weight in weights]])
            walk.advance(index, decoded)


def keep(kept: Kept, step: str, outcome: Outcome, **parameters: Any) -> None:
    how = {key: value for key, value in vars(outcome).items() if key not in {"parts", "bias"}}
    bias = {} if outcome.bias is None else {"bias": outcome.bias}
    kept.keep(step, how, {f"part:{name}": part for name, part in outcome.parts.items()} | bias, **parameters)


def restored(result: Result) -> Outcome:
    """Equal to what was kept, to the bit."""
    how = dict(result.values)
    how["notes"] = tuple(how["notes"])
    how["places"] = {name: (first, later) for name, (first, later) in how["places"].items()}
    parts = {name.removeprefix("part:"): part for name, part in result.tensors.items() if name.startswith("part:")}
    return Outcome(parts, **how, bias=result.tensors.get("bias"))


def _parameters(plan: Plan, weight: Weight) -> dict[str, Any]:
    entry = plan[weight.name]
    return {"weight": weight.name, "format": entry.format, "version": formats.get(entry.format).version, "method": entry.method}


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
