"""Samples on their way through a model, one block in memory at a time. Everything that runs a model block by block does it with `Walk`.

Between two blocks there is one buffer of hidden states, (tokens, width): in memory up to a limit, in a mapped file beyond it. The caller
says what happens at each block: what is recorded or rounded while it runs, which weights are changed, and which buffer its output goes to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from fewbits.errors import MissingError
from fewbits.model import placement
from fewbits.progress import say

if TYPE_CHECKING:
    from fewbits.model.blocks import Blocks
    from fewbits.model.stubs import Call
    from fewbits.progress import Progress
    from fewbits.store.mapped import Room

T = TypeVar("T")

SHARE_OF_SUMS = 0.5  # of the room, for the sums of one pass through a block; hidden states take the rest
BATCH_TOKENS = 2048  # enough rows for a matrix product to run at full speed


@dataclass(frozen=True)
class Batch:
    ids: Tensor  # (samples, length)
    half: int  # 0 or 1: calibration fits to one half of the samples and judges on the other
    start: int  # where its tokens begin in a buffer
    given: tuple[int, ...] = ()  # where each of its samples was in the list of all

    @property
    def where(self) -> slice:
        return slice(self.start, self.start + self.ids.numel())

    def view(self, states: Tensor) -> Tensor:  # (tokens, width) -> (samples, length, width)
        """The rows of a buffer that belong to this batch."""
        return states[self.where].view(*self.ids.shape, -1)

    def split(self, samples: int) -> list[Batch]:
        """Batches of at most so many samples."""
        step = samples * self.ids.shape[1]
        given = [self.given[i : i + samples] for i in range(0, len(self.ids), samples)]
        parts = zip(self.ids.split(samples), given, strict=True)
        return [Batch(ids, self.half, self.start + i * step, which) for i, (ids, which) in enumerate(parts)]


def batches(samples: Sequence[Sequence[int]]) -> list[Batch]:
    """Samples of one length and one half together: nothing is padded, because statistics would count the padding."""
    order = sorted(range(len(samples)), key=lambda i: (len(samples[i]), i % 2, i))
    result: list[Batch] = []
    start = 0
    while order:
        length, half = len(samples[order[0]]), order[0] % 2
        most = max(1, BATCH_TOKENS // length)
        alike = [i for i in order[:most] if len(samples[i]) == length and i % 2 == half]
        result.append(Batch(torch.tensor([list(samples[i]) for i in alike]), half, start, tuple(alike)))
        start += length * len(alike)
        order = order[len(alike) :]
    return result


class Walk:
    def __init__(self, blocks: Blocks, batches: Sequence[Batch], room: Room) -> None:
        self.blocks, self.batches, self.room = blocks.to(placement.current()), batches, room
        self.calls: dict[tuple[int, ...], list[Call]] = {}  # by the shape of a batch: the other arguments of each block

    @torch.no_grad()
    def enter(self, changed: Mapping[str, Callable[[], Tensor]] | None = None, before: Callable[[Batch], None] | None = None) -> Tensor:
        """A new buffer with what the first block reads. `changed`: embeddings by name, in place of the model's. Each batch is announced
        to `before`."""
        hidden = torch.empty(0)
        with self.blocks.swapped(self.blocks.outer_weights, changed or {}):
            for batch in self.batches:
                if before:
                    before(batch)
                entered, calls = self.blocks.enter(batch.ids)
                self.calls.setdefault(tuple(batch.ids.shape), calls)
                if not len(hidden):
                    hidden = self.room.new((self.batches[-1].where.stop, entered.shape[-1]))
                batch.view(hidden).copy_(entered)
        return hidden

    @cached_property
    def room_for_sums(self) -> int | None:
        """Bytes for the sums of one pass through a block; None: no limit is known. It does not depend on the samples, so that shards of
        them make the same passes."""
        where = self.blocks.device
        return int(self.room.limit * SHARE_OF_SUMS) if where.type == placement.CPU else placement.room_for_sums(where)

    def sums(self) -> Callable[[Sequence[int]], Tensor]:
        """What makes zero tensors for the sums of one block: on the device as long as there is room, else where hidden states are."""
        where = self.blocks.device
        left = 0 if where.type == placement.CPU else placement.room_for_sums(where)
        beside = self.room.rest()

        def new(shape: Sequence[int]) -> Tensor:
            nonlocal left
            nbytes = math.prod(shape) * torch.float32.itemsize
            if left is not None and nbytes > left:
                return beside.new(shape)
            left = None if left is None else left - nbytes
            return torch.zeros(*shape, device=where)

        return new

    def until_it_fits(self, work: Callable[[], T], progress: Progress[Any]) -> T:
        """The result of a pass through one block, begun anew with batches of half the size where the device has no room for them."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError as failure:
                if all(len(batch.ids) == 1 for batch in self.batches):
                    hint = "give a shorter `--length`, or `--device cpu`"
                    raise MissingError(f"{self.blocks.device} has no room for one sample in one block of the model", hint) from failure
            most = max(len(batch.ids) for batch in self.batches) // 2
            say(progress, f"{self.blocks.device} is out of memory: batches of at most {most} samples from here on")
            self._split(most)

    @torch.no_grad()
    def _split(self, most: int) -> None:
        self.batches = [part for batch in self.batches for part in batch.split(most)]
        for batch in self.batches:
            if tuple(batch.ids.shape) not in self.calls:
                self.calls[tuple(batch.ids.shape)] = self.blocks.enter(batch.ids)[1]

    @contextmanager
    def block(self, index: int, decoded: Mapping[str, Tensor] | None = None) -> Iterator[LoadedBlock]:
        """One block, in memory while inside. `decoded`: weights by name, in place of the model's."""
        with self.blocks.filled(index) as module:
            for weight in self.blocks.weights(index):
                if decoded and weight.name in decoded:
                    self.blocks.put(weight, decoded[weight.name])
            yield LoadedBlock(self, index, module)

    def advance(self, index: int, hidden: Tensor, decoded: Mapping[str, Tensor] | None = None) -> None:
        """This block's output in the place of its input."""
        with self.block(index, decoded) as block:
            block.run(hidden, hidden)


@dataclass(frozen=True)
class LoadedBlock:
    walk: Walk
    index: int
    module: nn.Module

    def call(self, batch: Batch, x: Tensor, cache: Any = None) -> Tensor:  # (samples, length, width) -> the same shape
        """One batch. `cache`: its `update` is given keys and values, if the block takes a cache."""
        call = self.walk.calls[tuple(batch.ids.shape)][self.index]
        return self.walk.blocks.run(self.index, x.to(self.walk.blocks.device), call, cache if "past_key_values" in call else None)

    @torch.no_grad()
    def run(self, hidden: Tensor, into: Tensor | None, before: Callable[[Batch], None] | None = None, cache: Any = None) -> None:
        """Every batch, each announced to `before`. `into`: the buffer for the output, `hidden` itself or another; None: not wanted."""
        for batch in self.walk.batches:
            if before:
                before(batch)
            out = self.call(batch, batch.view(hidden), cache)
            if into is not None:
                batch.view(into).copy_(out)
