"""A plan in, the packed parts of every weight out, one after the other: `independent` fits all weights to the float model's statistics,
`sequential` fits each block to what the quantized blocks before it give."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fewbits import formats, kernels, methods
from fewbits.methods import Outcome
from fewbits.progress import say
from fewbits.store import threads
from fewbits.store.cache import hash_of
from fewbits.store.scratch import scratch_folder

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.artifact import Artifact
    from fewbits.calibration.statistics import InputStatistics, WeightStatistics
    from fewbits.formats import Format
    from fewbits.methods import Method
    from fewbits.model import Model
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan
    from fewbits.progress import Progress
    from fewbits.store.cache import Cache, Result
    from fewbits.store.executors.crew import Crew


class StatisticsSource(Protocol):
    """Gives the statistics of a weight by its name; None: there are none of this one."""

    def of(self, weight: str) -> WeightStatistics | None: ...


_UNSEEN = "calibration saw none of its inputs: rounded without them"  # an expert that was never chosen, a grouped convolution
_FEW = "calibration gave it few tokens, or none: most of its statistics are those of all experts of its layer"
_MOSTLY = 0.5  # of its tokens are borrowed, or more
UNIT = "fewbits.artifact.units:weight"  # the function that a worker calls
Stream = Iterator[tuple["Weight", "Outcome"]]
Inputs = Mapping[str, "InputStatistics"]  # by weight


def independent(
    model: Model,
    plan: Plan,
    statistics: StatisticsSource | None,
    progress: Progress[Any],
    cache: Cache | None = None,
    crew: Crew | None = None,
) -> Stream:
    """No weight depends on the errors of another: any order gives the same codes, and a weight that is in the cache in the same format by
    the same method is reused. `cache` is for one model and its statistics. `crew`: workers that first quantize all that is not cached."""
    keys = {weight.name: _parameters(plan, weight) for weight in model.weights}
    if done := sum(cache.has("weight", **key) for key in keys.values()) if cache else 0:
        say(progress, f"resuming: {done} of {len(keys)} weights were there")
    if crew and cache:
        from fewbits.rewrites.statistics import sent

        inputs = sent(statistics, crew, cache)
        crew.finish("weight", UNIT, [(key, inputs.of(name)) for name, key in keys.items()], cache, progress, "quantizing")
    made = cache is not None and all(cache.has("weight", **key) for key in keys.values())
    stream = _made_or_cached(model, plan, statistics, cache, keys)
    yield from progress(stream, len(model.weights), "gathering" if crew and made else "quantizing")


def _made_or_cached(
    model: Model, plan: Plan, statistics: StatisticsSource | None, cache: Cache | None, keys: Mapping[str, Mapping[str, Any]]
) -> Stream:
    """Neighbouring weights that take one thread each are made side by side, as many as may be in memory together."""
    from fewbits.sensitivity.prediction import rounded_bytes  # loads torch, which a target does without

    turns = threads.Turns(threads.TOGETHER)

    def takes_one_thread(weight: Weight) -> bool:
        return methods.get(plan[weight.name].method).needs_statistics and not threads.are_all_used(weight.shape)

    def one(weight: Weight) -> tuple[Outcome, bool]:
        """And whether it is new."""
        if cache and (done := cache.find("weight", **keys[weight.name])):
            return restored(done), False
        (rows, cols), feedback = weight.shape, methods.get(plan[weight.name].method).needs_statistics
        with turns.taken(rounded_bytes(rows * cols, cols, feedback)):
            return _by_plan(model, weight, plan, statistics), True

    for narrow, run in itertools.groupby(model.weights, takes_one_thread):
        weights = list(run)
        made = threads.side_by_side(one, weights) if narrow else map(one, weights)
        for weight, (outcome, new) in zip(weights, made, strict=True):
            if cache and new:
                keep(cache, "weight", outcome, **keys[weight.name])
            yield weight, outcome


def sequential(
    model: Model,
    plan: Plan,
    statistics: StatisticsSource,
    samples: Sequence[Sequence[int]],
    memory: int,
    progress: Progress[Any],
    cache: Cache | None = None,
) -> Stream:
    """A block's inputs are taken after the blocks before it were quantized, so that it is fitted to what it will really read.

    The loss weights stay those of the float model: a backward pass per block would cost as much as all the rest. The hidden states are not
    cached: a run that resumes takes them through the finished blocks, which is a small part of what each cost.
    """
    from fewbits.calibration.recorders import block_inputs
    from fewbits.model.blocks import Blocks
    from fewbits.model.walk import Walk, batches
    from fewbits.store.mapped import Room

    blocks = Blocks(model)
    with cache.scratch() if cache else scratch_folder() as scratch:
        walk = Walk(blocks, batches(samples), Room(Path(scratch), memory))
        hidden = walk.enter()
        for weight in blocks.outer_weights:
            yield weight, _once(cache, _parameters(plan, weight), partial(_by_plan, model, weight, plan, statistics))
        before = hash_of(samples)  # a hash of all that the inputs of the next block depend on
        for index in progress(range(len(blocks)), len(blocks), "quantizing, block by block"):
            weights, decoded = blocks.weights(index), {}
            inputs = functools.cache(partial(block_inputs, walk, index, hidden))  # computed when a weight asks for them
            for weight in weights:
                key = _parameters(plan, weight) | {"before": before}
                outcome = _once(cache, key, partial(_by_plan, model, weight, plan, statistics, inputs))
                decoded[weight.name] = kernels.decode(formats.get(plan[weight.name].format), outcome.parts, weight.shape)
                yield weight, outcome
            before = hash_of([before, [_parameters(plan, weight) for weight in weights]])
            walk.advance(index, hidden, decoded)


def _once(cache: Cache | None, key: Mapping[str, Any], make: Callable[[], Outcome]) -> Outcome:
    """From the cache, or made now and put there."""
    if cache and (done := cache.find("weight", **key)):
        return restored(done)
    outcome = make()
    if cache:
        keep(cache, "weight", outcome, **key)
    return outcome


def keep(cache: Cache, step: str, outcome: Outcome, **parameters: Any) -> None:
    cache.keep(step, *packed(outcome), **parameters)


def packed(outcome: Outcome) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The values and the tensors that the cache stores."""
    how = {key: value for key, value in vars(outcome).items() if key not in {"parts", "bias"}}
    bias = {} if outcome.bias is None else {"bias": outcome.bias}
    return how, {f"part:{name}": part for name, part in outcome.parts.items()} | bias


def restored(result: Result) -> Outcome:
    """The outcome that `packed` was given, equal to the bit."""
    how = dict(result.values)
    how["notes"] = tuple(how["notes"])
    how["places"] = {name: (first, later) for name, (first, later) in how["places"].items()}
    parts = {name.removeprefix("part:"): part for name, part in result.tensors.items() if name.startswith("part:")}
    return Outcome(parts, **how, bias=result.tensors.get("bias"))


def _parameters(plan: Plan, weight: Weight) -> dict[str, Any]:
    entry = plan[weight.name]
    return {"weight": weight.name, "format": entry.format, "version": formats.get(entry.format).version, "method": entry.method}


class ArtifactOutcomes(Mapping[str, Outcome]):
    """The outcomes of an artifact's weights, by name; parts are read when asked for."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._weights = {weight.name: weight for weight in artifact.weights}

    def __getitem__(self, name: str) -> Outcome:
        how: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in self._artifact.outcomes[name].items()
        }
        bias = f"{name}.bias"
        corrected = self._artifact.tensor(bias) if bias in self._artifact.rest else None
        return Outcome(self._artifact.parts(self._weights[name]), **how, bias=corrected)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _by_plan(model: Model, weight: Weight, plan: Plan, statistics: StatisticsSource | None, inputs: Callable[[], Inputs] = dict) -> Outcome:
    entry = plan[weight.name]
    return quantized(model, weight, entry.format, entry.method, statistics, inputs)


def quantized(
    model: Model,
    weight: Weight,
    format: str,
    method: str,
    statistics: StatisticsSource | None,
    inputs: Callable[[], Inputs] = dict,
) -> Outcome:
    """`inputs`: the current inputs by weight, which replace those of the statistics."""
    current, chooser = inputs(), methods.get(method)  # perhaps a block is run for them, on all threads
    with threads.for_weight(weight.shape) if chooser.needs_statistics else nullcontext():  # rounding alone shares its rows among threads
        return _quantized(model, weight, formats.get(format), chooser, statistics, current)


def _quantized(model: Model, weight: Weight, fmt: Format, chooser: Method, statistics: StatisticsSource | None, inputs: Inputs) -> Outcome:
    from fewbits.rewrites.bias import corrected_bias  # loads torch, which a target does without

    w = model.load(weight)
    known, seen = statistics.of(weight.name) if statistics else None, inputs.get(weight.name)
    if known is not None and seen is not None and seen.tokens() and known.borrowed < _MOSTLY:
        known = replace(known, input=seen)
    if statistics and chooser.needs_statistics and not fmt.is_cast and not (known and known.has_importance):
        return replace(methods.get("rtn").quantize(w, fmt), notes=(_UNSEEN,))
    outcome = chooser.quantize(w, fmt, known)
    if known is not None and known.borrowed >= _MOSTLY and not fmt.is_cast and chooser.needs_statistics:
        outcome = replace(outcome, notes=(*outcome.notes, _FEW))
    name = f"{weight.name}.bias"
    if fmt.is_cast or known is None or known.input is None or not known.input.count.sum() or name not in model.rest:
        return outcome
    decoded = kernels.decode(fmt, outcome.parts, weight.shape)
    return replace(outcome, bias=corrected_bias(model.tensor(name), w, decoded, known.input.later_mean()))
