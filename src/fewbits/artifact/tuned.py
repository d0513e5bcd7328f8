"""Every weight of a quantized model with its scales tuned, block after block, each on the output of the tuned blocks before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits import formats, kernels
from fewbits.artifact.outcomes import keep, restored
from fewbits.methods.tuned_scales import minibatches, tune
from fewbits.model.blocks import Blocks
from fewbits.model.walk import Walk
from fewbits.progress import silent
from fewbits.store.cache import hash_of
from fewbits.store.mapped import Room
from fewbits.store.scratch import scratch_folder

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.methods import Outcome
    from fewbits.model import Model
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan
    from fewbits.progress import Progress
    from fewbits.store.cache import Cache


def tuned_outcomes(
    model: Model,
    plan: Plan,
    samples: Sequence[Sequence[int]],
    outcomes: Mapping[str, Outcome],
    steps: int,
    memory: int,
    progress: Progress[int] = silent,
    cache: Cache | None = None,
) -> Iterator[tuple[Weight, Outcome]]:
    """Weights outside of blocks are yielded unchanged, first. The notes on a block are in the outcome of its first weight.

    `memory`: bytes of hidden states, the float model's and the quantized one's; beyond it they are in mapped files. `cache`: of finished
    blocks; a run that resumes takes the hidden states through them again, which costs as much as a few of the steps.
    """
    blocks = Blocks(model)

    def decoded(weight: Weight, outcomes: Mapping[str, Outcome]) -> Tensor:
        return kernels.decode(formats.get(plan[weight.name].format), outcomes[weight.name].parts, weight.shape)

    with cache.scratch() if cache else scratch_folder() as scratch:
        walk = Walk(blocks, minibatches(samples), Room(Path(scratch), memory))
        reference = walk.enter()
        quantized = walk.enter({weight.name: partial(decoded, weight, outcomes) for weight in blocks.outer_weights})
        yield from ((weight, outcomes[weight.name]) for weight in blocks.outer_weights)
        before = hash_of([samples, steps, [(entry.weight, entry.format, entry.method) for entry in plan.entries]])
        for index in progress(range(len(blocks)), len(blocks), "tuning scales"):
            weights = blocks.weights(index)
            results = [cache.find("tuned", weight=weight.name, before=before) if cache else None for weight in weights]
            walk.advance(index, reference)
            if all(results):
                finished = {weight.name: restored(result) for weight, result in zip(weights, results, strict=True) if result}
            else:
                untuned = {weight.name: (plan[weight.name].format, outcomes[weight.name]) for weight in weights}
                finished = _tuned_block(walk, index, untuned, quantized, reference, steps)
                for name, outcome in finished.items():
                    if cache:
                        keep(cache, "tuned", outcome, weight=name, before=before)
            walk.advance(index, quantized, {weight.name: decoded(weight, finished) for weight in weights})
            yield from ((weight, finished[weight.name]) for weight in weights)


def _tuned_block(
    walk: Walk, index: int, outcomes: Mapping[str, tuple[str, Outcome]], inputs: Tensor, targets: Tensor, steps: int
) -> dict[str, Outcome]:
    unpacked = {name: (formats.get(fmt), *formats.get(fmt).unpack(outcome.parts)) for name, (fmt, outcome) in outcomes.items()}
    tuned = tune(walk, index, unpacked, inputs, targets, steps)
    finished: dict[str, Outcome] = {}
    for name, (fmt, codes, start) in unpacked.items():
        outcome, grid = outcomes[name][1], tuned.grids[name]
        parts = outcome.parts if grid is start else kernels.pack(fmt, codes, grid)
        finished[name] = replace(outcome, parts=parts, notes=(*outcome.notes, *(() if finished else tuned.notes)))
    return finished
