"""The float model and changed copies of it, run side by side, one block at a time: each block is loaded once for all of them.

A changed copy is a stream of hidden states. It begins at its first changed weight, from the hidden states of another stream, so that a
model with one changed weight costs only the blocks after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.errors import InputError
from fewbits.model.blocks import Blocks
from fewbits.model.walk import Walk, batches
from fewbits.store.heap import return_free_memory
from fewbits.store.mapped import Room
from fewbits.store.scratch import scratch_folder
from fewbits.verification import embeddings
from fewbits.verification.metrics import MeasuredLogits

if TYPE_CHECKING:
    from fewbits.model import Model
    from fewbits.progress import Progress

FLOAT = "float"
ENTRY = -1  # before the first block: a stream with a changed embedding begins here


@dataclass(frozen=True)
class Stream:
    """A copy of the model with some weights changed, by name. Each is computed when its block is loaded, and freed after it."""

    changed: Mapping[str, Callable[[], Tensor]]
    parent: str = FLOAT  # the stream that it is equal to up to its first block
    start: int | None = None  # its first block, where it departs from its parent; None: the block of its first changed weight


@dataclass
class Comparison:
    measured: dict[str, MeasuredLogits]  # by stream: against the float model, at every position that has a following token, as given
    errors: dict[str, dict[int, float]] = field(default_factory=dict)  # stream -> block -> relative squared error of the block's output


@torch.no_grad()
def compare_streams(
    model: Model,
    windows: Sequence[Sequence[int]],
    streams: Mapping[str, Stream],
    memory: int,
    progress: Progress[int],
    watch: Sequence[str] = (),
) -> Comparison:
    """KL of each stream to the float model. `watch`: streams whose hidden states are compared after every block."""
    expect_logits(model)
    blocks = Blocks(model, memory).expect_chain()
    with scratch_folder() as scratch:
        run = _SideBySide(Walk(blocks, batches(windows), Room(Path(scratch), memory)), streams)
        errors: dict[str, dict[int, float]] = {name: {} for name in watch}
        for index in progress(range(len(blocks)), len(blocks), "running side by side"):
            run.block(index)
            for name in watch:
                errors[name][index] = run.error(name)
        return Comparison(run.leave(progress), errors)


def expect_logits(model: Model) -> None:
    if embeddings.given_by(model.config):
        raise InputError(f"`{model.name}` gives embeddings, and no logits whose KL could be measured", "leave `--probes` and `--kv` out")


class _SideBySide:
    def __init__(self, walk: Walk, streams: Mapping[str, Stream]) -> None:
        self.walk, self.blocks = walk, walk.blocks
        self.streams = {name: replace(stream, start=self._start(stream)) for name, stream in streams.items()}
        self.hidden = {FLOAT: walk.enter()}
        self.hidden |= {name: walk.enter(stream.changed) for name, stream in self.streams.items() if stream.start == ENTRY}

    def _start(self, stream: Stream) -> int:
        if stream.start is not None:
            return stream.start
        changed = [i for i in range(len(self.blocks)) if any(name.startswith(f"{self.blocks.prefix(i)}.") for name in stream.changed)]
        inside = all(any(name.startswith(f"{self.blocks.prefix(i)}.") for i in changed) for name in stream.changed)
        return min(changed) if changed and inside else ENTRY

    def block(self, index: int) -> None:
        weights = self.blocks.weights(index)
        # those that begin here come first: they read what their parent had before this block
        begin = [name for name, stream in self.streams.items() if stream.start == index]
        go_on = [name for name in self.streams if name in self.hidden]
        with self.walk.block(index) as block:
            for name in (*begin, *go_on):
                stream = self.streams[name]
                source = self.hidden[stream.parent if name in begin else name]
                if name in begin:
                    self.hidden[name] = self.walk.room.new(source.shape)
                with self.blocks.swapped(weights, stream.changed):
                    block.run(source, self.hidden[name])
            block.run(self.hidden[FLOAT], self.hidden[FLOAT])

    def error(self, name: str) -> float:
        if name not in self.hidden:
            return 0.0
        width = self.blocks.layout.hidden.columns
        exact, changed = self.hidden[FLOAT][:, :width], self.hidden[name][:, :width]
        # each token relative to its size: a massive first token would drown all others
        return float(((changed - exact).square().sum(1) / exact.square().sum(1).clamp(min=1e-30)).double().mean())

    def leave(self, progress: Progress[Any]) -> dict[str, MeasuredLogits]:
        by_sample: dict[str, dict[int, MeasuredLogits]] = {name: {} for name in self.streams}
        once = cache(lambda make: make())  # an output matrix that several streams change alike is computed once
        outputs = [weight for weight in self.blocks.outer_weights if weight.kind != "embedding" or weight.tied_to]
        changed = {
            name: {weight.name: partial(once, stream.changed[weight.name]) for weight in outputs if weight.name in stream.changed}
            for name, stream in self.streams.items()
        }
        samples = [sample for batch in self.walk.batches for sample in batch.split(1)]
        for sample in progress(samples, len(samples), "comparing outputs"):
            following = sample.ids[0, 1:]
            reference = self.blocks.leave(sample.view(self.hidden[FLOAT]))[0, :-1]
            for name in self.streams:
                with self.blocks.swapped(outputs, changed[name]):
                    logits = self.blocks.leave(sample.view(self.hidden.get(name, self.hidden[FLOAT])))[0, :-1]
                each = by_sample[name].setdefault(sample.given[0], MeasuredLogits())
                each.add(reference, logits, following)
                return_free_memory()
        measured = {name: MeasuredLogits() for name in self.streams}
        for name, results in by_sample.items():
            for given in sorted(results):
                measured[name].extend(results[given])
        return measured
