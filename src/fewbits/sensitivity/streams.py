"""The float model and changed copies of it, run side by side, one block at a time: each block is loaded once for all of them.

A stream begins where its first changed weight is, from the hidden states of another stream, so that a model with one changed weight
costs only the blocks after it. What is kept between blocks is one buffer of hidden states per stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.allocator import give_back
from fewbits.blocks import Blocks
from fewbits.calibration.collecting import batches
from fewbits.scratch import scratch_folder
from fewbits.spilled import Room
from fewbits.verification import Measured

if TYPE_CHECKING:
    from fewbits.blocks import Call
    from fewbits.model import Model
    from fewbits.progress import Progress

FLOAT = "float"
ENTRY = -1  # before the first block: a stream with a changed embedding begins here


@dataclass(frozen=True)
class Stream:
    """A copy of the model with some of its weights changed, by name; each is made when its block is there, and let go of after it."""

    changed: Mapping[str, Callable[[], Tensor]]
    parent: str = FLOAT  # the stream that it is equal to up to its first block
    start: int | None = None  # the first block that it runs by itself; None: the one of its first changed weight


@dataclass
class Walked:
    measured: dict[str, Measured]  # by stream: against the float model, at every position that has a following token
    errors: dict[str, dict[int, float]] = field(default_factory=dict)  # stream -> block -> squared error of what it gives, relative


@torch.no_grad()
def walk(
    model: Model,
    windows: Sequence[Sequence[int]],
    streams: Mapping[str, Stream],
    memory: int,
    progress: Progress[int],
    watch: Sequence[str] = (),
) -> Walked:
    """KL of each stream to the float model. `watch`: streams whose hidden states are compared after every block."""
    with scratch_folder() as scratch:
        return _Walk(model, windows, streams, Path(scratch), memory).run(progress, watch)


class _Walk:
    def __init__(self, model: Model, windows: Sequence[Sequence[int]], streams: Mapping[str, Stream], scratch: Path, memory: int) -> None:
        self.blocks, self.batches = Blocks(model, memory).expect_chain(), batches(windows)
        self.streams = {name: replace(stream, start=self._start(stream)) for name, stream in streams.items()}
        self.outer = {weight.name: weight for weight in self.blocks.outer_weights}
        self._left = {name for name, weight in self.outer.items() if weight.kind != "embedding" or weight.tied_to}  # read at the end
        self.calls: dict[tuple[int, ...], list[Call]] = {}
        self.hidden: dict[str, Tensor] = {}
        self._room = Room(scratch, memory)

    def run(self, progress: Progress[int], watch: Sequence[str]) -> Walked:
        self._enter(FLOAT, {})
        for name, stream in self.streams.items():
            if stream.start == ENTRY:
                self._enter(name, {w: made for w, made in stream.changed.items() if w in self.outer})
        errors: dict[str, dict[int, float]] = {name: {} for name in watch}
        for index in progress(range(len(self.blocks)), len(self.blocks), "running side by side"):
            self._block(index)
            for name in watch:
                errors[name][index] = self._error(name)
        return Walked(self._leave(progress), errors)

    def _start(self, stream: Stream) -> int:
        if stream.start is not None:
            return stream.start
        own = [i for i in range(len(self.blocks)) if any(name.startswith(f"{self.blocks.prefix(i)}.") for name in stream.changed)]
        inside = all(any(name.startswith(f"{self.blocks.prefix(i)}.") for i in own) for name in stream.changed)
        return min(own) if own and inside else ENTRY

    def _enter(self, name: str, changed: Mapping[str, Callable[[], Tensor]]) -> None:
        with self.blocks.swapped(list(self.outer.values()), changed):
            for batch in self.batches:
                hidden, calls = self.blocks.enter(batch.ids)
                self.calls.setdefault(tuple(batch.ids.shape), calls)
                if name not in self.hidden:
                    self.hidden[name] = self._room.new((self.batches[-1].where.stop, hidden.shape[-1]))
                self.hidden[name][batch.where] = hidden.reshape(-1, hidden.shape[-1])

    def _block(self, index: int) -> None:
        weights = self.blocks.weights(index)
        here = {weight.name for weight in weights}
        # children first: they branch off what their parent had before this block
        order = [name for name, stream in self.streams.items() if stream.start == index]
        order += [name for name in self.streams if name in self.hidden]
        with self.blocks.filled(index) as block:
            for name in (*order, FLOAT):
                stream = self.streams.get(name)
                begins = stream is not None and stream.start == index
                source = self.hidden[stream.parent if stream and begins else name]
                if begins:
                    self.hidden[name] = self._room.new(source.shape)
                changed = {w: made for w, made in stream.changed.items() if w in here} if stream else {}
                with self.blocks.swapped(weights, changed):
                    for batch in self.batches:
                        x = source[batch.where].view(*batch.ids.shape, -1)
                        out = self.blocks.run(block, x, self.calls[tuple(batch.ids.shape)][index])
                        self.hidden[name][batch.where] = out.reshape(-1, out.shape[-1])

    def _error(self, name: str) -> float:
        if name not in self.hidden:
            return 0.0
        exact, own = self.hidden[FLOAT], self.hidden[name]
        # each token relative to its own size: a massive first token would drown all others
        return float(((own - exact).square().sum(1) / exact.square().sum(1).clamp(min=1e-30)).double().mean())

    def _leave(self, progress: Progress[Any]) -> dict[str, Measured]:
        measured = {name: Measured() for name in self.streams}
        made = cache(lambda make: make())  # streams that change an output alike share it
        rows = [(batch, row) for batch in self.batches for row in range(len(batch.ids))]
        for batch, row in progress(rows, len(rows), "comparing outputs"):
            length = batch.ids.shape[1]
            where = slice(batch.where.start + row * length, batch.where.start + (row + 1) * length)
            following = batch.ids[row, 1:]
            reference = self.blocks.leave(self.hidden[FLOAT][where].unsqueeze(0))[0, :-1]
            for name in self.streams:
                own = {w: partial(made, make) for w, make in self.streams[name].changed.items() if w in self._left}
                with self.blocks.swapped(list(self.outer.values()), own):
                    logits = self.blocks.leave(self.hidden[name if name in self.hidden else FLOAT][where].unsqueeze(0))[0, :-1]
                measured[name].add(reference, logits, following)
                give_back()
        return measured
