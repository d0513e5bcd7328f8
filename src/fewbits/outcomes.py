"""Every weight by its plan, one after the other: all from the float model's statistics, or block by block after the quantized ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fewbits import formats, kernels, methods
from fewbits.kept import hash_of
from fewbits.methods import Outcome
from fewbits.progress import say
from fewbits.rewrites.bias import corrected_bias
from fewbits.scratch import scratch_folder

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.artifact import Artifact
    from fewbits.calibration.statistics import InputStatistics, WeightStatistics
    from fewbits.executors.crew import Crew
    from fewbits.kept import Kept, Result
    from fewbits.model import Model, Weight
    from fewbits.planning import Plan
    from fewbits.progress import Progress


class Known(Protocol):
    """Whatever knows the statistics of weights; None: nothing is known of this one."""

    def of(self, weight: str) -> WeightStatistics | None: ...


class Chosen(Protocol):
    """What a plan says of a weight, as far as its codes go."""

    @property
    def format(self) -> str: ...

    @property
    def method(self) -> str: ...


_UNSEEN = "calibration saw none of its inputs: rounded without them"  # an expert that was never chosen, a convolution in groups
Stream = Iterator[tuple["Weight", "Outcome"]]


def independent(
    model: Model, plan: Plan, statistics: Known | None, progress: Progress[Any], kept: Kept | None = None, crew: Crew | None = None
) -> Stream:
    """No weight knows of another's errors: any order gives the same codes, and one that was quantized before in the same format by the
    same method is the same. `kept` tells apart models and statistics. `crew`: who makes what is not there, all of it first."""
    own = {weight.name: _parameters(plan, weight) for weight in model.weights}
    if found := sum(kept.has("weight", **each) for each in own.values()) if kept else 0:
        say(progress, f"going on: {found} of {len(own)} weights were there")
    if crew and kept:
        known = crew.knowledge(statistics, kept)
        crew.finish("weight", [(each, known.of(name)) for name, each in own.items()], kept, progress, "quantizing")
    for weight in progress(model.weights, len(model.weights), "gathering" if crew else "quantizing"):
        yield weight, _once(kept, own[weight.name], partial(quantized, model, weight, plan[weight.name], statistics))


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
    with kept.scratch() if kept else scratch_folder() as scratch:
        walk = Sequential(blocks, samples, Path(scratch), memory)
        for weight in blocks.outer_weights:
            yield weight, _once(kept, _parameters(plan, weight), partial(quantized, model, weight, plan[weight.name], statistics))
        before = hash_of(samples)  # all that the inputs of a block depend on
        for index in progress(range(len(blocks)), len(blocks), "quantizing, block by block"):
            weights, decoded = blocks.weights(index), {}
            inputs = cache(partial(walk.inputs, index))  # taken when a weight asks for them
            for weight in weights:
                own = _parameters(plan, weight) | {"before": before}
                outcome = _once(kept, own, partial(quantized, model, weight, plan[weight.name], statistics, inputs))
                decoded[weight.name] = kernels.decode(formats.get(plan[weight.name].format), outcome.parts, weight.shape)
                yield weight, outcome
            before = hash_of([before, [_parameters(plan, weight) for weight in weights]])
            walk.advance(index, decoded)


def _once(kept: Kept | None, own: Mapping[str, Any], make: Callable[[], Outcome]) -> Outcome:
    """As an earlier run kept it, or made now and kept for the next."""
    if kept and (done := kept.find("weight", **own)):
        return restored(done)
    outcome = make()
    if kept:
        keep(kept, "weight", outcome, **own)
    return outcome


def keep(kept: Kept, step: str, outcome: Outcome, **parameters: Any) -> None:
    kept.keep(step, *packed(outcome), **parameters)


def packed(outcome: Outcome) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The values and the tensors of what is kept of it."""
    how = {key: value for key, value in vars(outcome).items() if key not in {"parts", "bias"}}
    bias = {} if outcome.bias is None else {"bias": outcome.bias}
    return how, {f"part:{name}": part for name, part in outcome.parts.items()} | bias


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


def quantized(
    model: Model,
    weight: Weight,
    chosen: Chosen,
    statistics: Known | None,
    inputs: Callable[[], Mapping[str, InputStatistics]] = dict,
) -> Outcome:
    """`inputs`: of weights by name, as they are now, in place of those that the statistics hold."""
    fmt, w = formats.get(chosen.format), model.load(weight)
    known, seen = statistics.of(weight.name) if statistics else None, inputs().get(weight.name)
    if known is not None and seen is not None and seen.tokens():
        known = replace(known, input=seen)
    method = methods.get(chosen.method)
    if statistics and method.needs_statistics and fmt.levels is not None and not (known and known.has_importance):
        return replace(methods.get("rtn").quantize(w, fmt), notes=(_UNSEEN,))
    outcome = method.quantize(w, fmt, known)
    name = f"{weight.name}.bias"
    if fmt.levels is None or known is None or known.input is None or not known.input.count.sum() or name not in model.rest:
        return outcome
    decoded = kernels.decode(fmt, outcome.parts, weight.shape)
    return replace(outcome, bias=corrected_bias(model.tensor(name), w, decoded, known.input.later_mean()))
