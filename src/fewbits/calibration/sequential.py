"""Statistics as the quantized model gives them: each block's inputs are taken after the blocks before it were quantized.

The errors made so far are then part of what a block is fitted to. The loss weights stay those of the float model: a backward pass
per block would cost as much as all the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fewbits.allocator import give_back
from fewbits.calibration.collecting import batches
from fewbits.calibration.recording import InputRecorder, finished, watched
from fewbits.spilled import Room

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.blocks import Blocks, Call
    from fewbits.calibration.statistics import InputStatistics


class Sequential:
    def __init__(self, blocks: Blocks, samples: Sequence[Sequence[int]], scratch: Path, memory: int) -> None:
        self.blocks = blocks
        self._batches = batches(samples)
        self._calls: dict[tuple[int, ...], list[Call]] = {}
        self._hidden: Tensor | None = None
        self._scratch, self._left = scratch, memory
        for batch in self._batches:
            hidden, calls = blocks.enter(batch.ids)
            self._calls.setdefault(tuple(batch.ids.shape), calls)
            if self._hidden is None:
                self._hidden = Room(scratch, memory).new((self._batches[-1].where.stop, hidden.shape[-1]))
                self._left = max(0, memory - self._hidden.nbytes)
            self._hidden[batch.where] = hidden.reshape(-1, hidden.shape[-1])

    def inputs(self, index: int) -> dict[str, InputStatistics]:
        """Of every weight of this block, by name: what it reads now."""
        recorder = InputRecorder(watched(self.blocks, self.blocks.weights(index)), True, Room(self._scratch, self._left).new)
        self._run(index, {}, recorder)
        return {reader: found for found, readers in finished(recorder).values() for reader in readers}

    def advance(self, index: int, decoded: Mapping[str, Tensor]) -> None:
        """Go on through this block, with these weights in it."""
        self._run(index, decoded, None)
        give_back()

    @torch.no_grad()
    def _run(self, index: int, decoded: Mapping[str, Tensor], recorder: InputRecorder | None) -> None:
        assert self._hidden is not None
        with ExitStack() as stack:
            block = stack.enter_context(self.blocks.filled(index))
            for weight in self.blocks.weights(index):
                if weight.name in decoded:
                    self.blocks.put(weight, decoded[weight.name])
            if recorder:
                stack.enter_context(recorder.attached())
            for batch in self._batches:
                if recorder:
                    recorder.next_call(batch.half, *batch.ids.shape)
                x = self._hidden[batch.where].view(*batch.ids.shape, -1)
                out = self.blocks.run(block, x, self._calls[tuple(batch.ids.shape)][index])
                if recorder is None:
                    self._hidden[batch.where] = out.reshape(-1, out.shape[-1])
