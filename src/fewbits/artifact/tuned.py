"""Every weight of a quantized model with its scales tuned, all of them together, on what the float model predicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import formats, kernels
from fewbits.artifact.outcomes import keep, restored
from fewbits.methods.tuned_scales import STATE, minibatches, tune
from fewbits.model.blocks import Blocks
from fewbits.model.walk import Walk
from fewbits.progress import silent
from fewbits.store.cache import hash_of
from fewbits.store.mapped import Room
from fewbits.store.scratch import scratch_folder

if TYPE_CHECKING:
    from fewbits.methods import Outcome
    from fewbits.methods.tuned_scales import Quantized
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
    progress: Progress[Any] = silent,
    cache: Cache | None = None,
) -> Iterator[tuple[Weight, Outcome]]:
    """The notes are in the outcome of the first weight. `memory`: bytes of hidden states and codes; beyond it they are in mapped files."""
    before = hash_of([samples, steps, [(entry.weight, entry.format, entry.method) for entry in plan.entries]])
    results = {weight.name: cache.find("tuned", weight=weight.name, before=before) if cache else None for weight in model.weights}
    if all(results.values()):
        yield from ((weight, restored(result)) for weight in model.weights if (result := results[weight.name]))
        return
    with cache.scratch() if cache else scratch_folder() as scratch:
        room = Room(Path(scratch), memory)
        quantized = {weight.name: _unpacked(plan[weight.name].format, outcomes[weight.name], room) for weight in model.weights}
        tuned = tune(
            Walk(Blocks(model), minibatches(samples), room),
            quantized,
            steps,
            progress=progress,
            cache=cache.of(before=before) if cache else None,
        )
        for number, weight in enumerate(model.weights):
            outcome, (fmt, codes, start), grid = outcomes[weight.name], quantized[weight.name], tuned.grids[weight.name]
            parts = outcome.parts if grid is start else kernels.pack(fmt, codes, grid)
            outcome = replace(outcome, parts=parts, notes=(*outcome.notes, *(() if number else tuned.notes)))
            if cache:
                keep(cache, "tuned", outcome, weight=weight.name, before=before)
            yield weight, outcome
    if cache:
        cache.drop_step(STATE)


def _unpacked(name: str, outcome: Outcome, room: Room) -> Quantized:
    fmt = formats.get(name)
    codes, grid = fmt.unpack(outcome.parts)
    return fmt, room.new(codes.shape, codes.dtype).copy_(codes), grid
