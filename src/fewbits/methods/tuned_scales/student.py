"""The quantized model on its way through a minibatch, one block in memory at a time, and the gradient of its divergence on the way back.

What the float model predicts is computed from its last hidden states, which are taken once for all samples. The quantized model's states
between blocks are kept for one minibatch; each block is run again on the way back, now with a graph to its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits.methods.tuned_scales.scales import Scales
from fewbits.progress import silent

if TYPE_CHECKING:
    from typing import Any

    from fewbits.formats import Grid
    from fewbits.model.walk import Batch, Walk
    from fewbits.model.weights import Weight
    from fewbits.progress import Progress

Grids = Mapping[str, "Grid"]


class Student:
    def __init__(self, walk: Walk, scales: Mapping[str, Scales], progress: Progress[Any] = silent) -> None:
        self._walk, self._blocks, self._scales = walk, walk.blocks, scales
        self._entry = [weight for weight in self._blocks.outer_weights if weight.name in scales and weight.kind != "output"]
        self._exit = [
            weight for weight in self._blocks.outer_weights if weight.name in scales and (weight.kind == "output" or weight.tied_to)
        ]
        self._teacher = walk.enter()
        for index in progress(range(len(self._blocks)), len(self._blocks), "the float model, to tune scales"):
            walk.advance(index, self._teacher)
        widest = max(batch.ids.numel() for batch in walk.batches)
        # what each block reads, and the last one gives
        self._states = walk.room.new((len(self._blocks) + 1, widest, self._teacher.shape[-1]))

    @torch.no_grad()
    def divergence(self, batches: Sequence[Batch], grids: Grids | None = None) -> float:
        """KL(float model || quantized one), the mean over these tokens, with these grids or those that descent has come to."""
        outer = self._outer(grids)
        total = 0.0
        for batch in batches:
            self._forward(batch, outer, grids)
            total += self._judge(batch, outer, None)
        return total / sum(batch.ids.numel() for batch in batches)

    @torch.enable_grad()
    def add_gradient(self, batch: Batch) -> None:
        """Of the mean divergence of these tokens, to all scales."""
        outer = self._outer(None)
        self._forward(batch, outer, None)
        back = torch.empty_like(batch.view(self._teacher))
        self._judge(batch, outer, back)
        for index in reversed(range(len(self._blocks))):
            back = self._back(index, batch, back)
        with self._in_place(self._entry, outer), self._collecting(self._entry):
            entered = self._blocks.enter(batch.ids)[0]
            if entered.requires_grad:
                entered.backward(back)

    @torch.no_grad()
    def _forward(self, batch: Batch, outer: Mapping[str, Tensor], grids: Grids | None) -> None:
        with self._in_place(self._entry, outer):
            self._state(0, batch).copy_(self._blocks.enter(batch.ids)[0])
        for index in range(len(self._blocks)):
            with self._walk.block(index, {weight.name: self._decoded(weight, grids) for weight in self._inside(index)}) as block:
                self._state(index + 1, batch).copy_(block.call(batch, self._state(index, batch)))

    def _judge(self, batch: Batch, outer: Mapping[str, Tensor], back: Tensor | None) -> float:
        """The sum over tokens of the divergence. `back` (samples, length, width) gets the gradient of its mean at the last block's output.
        One sample at a time: logits are wide."""
        with torch.no_grad():
            teacher = [self._blocks.leave(state.unsqueeze(0)).float().log_softmax(-1) for state in batch.view(self._teacher)]
        total = 0.0
        with self._in_place(self._exit, outer), nullcontext() if back is None else self._collecting(self._exit):
            for number, wanted in enumerate(teacher):
                here = slice(number, number + 1)
                x = self._state(len(self._blocks), batch)[here].detach().requires_grad_(back is not None)
                divergence = (wanted.exp() * (wanted - self._blocks.leave(x).float().log_softmax(-1))).sum()
                total += float(divergence.detach())
                if back is not None:
                    (divergence / batch.ids.numel()).backward()
                    assert x.grad is not None
                    back[here] = x.grad
        return total

    def _back(self, index: int, batch: Batch, gradient: Tensor) -> Tensor:
        weights = self._inside(index)
        with self._walk.block(index, {weight.name: self._decoded(weight, None) for weight in weights}) as block, self._collecting(weights):
            x = self._state(index, batch).detach().requires_grad_()
            block.call(batch, x).backward(gradient)
        assert x.grad is not None
        return x.grad

    def _in_place(self, weights: Sequence[Weight], outer: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """While inside, quantized values outside of blocks."""
        return self._blocks.swapped(weights, {weight.name: partial(outer.__getitem__, weight.name) for weight in weights})

    @contextmanager
    def _collecting(self, weights: Sequence[Weight]) -> Iterator[None]:
        """While inside, these weights gather gradients, which reach their scales at the end."""
        for weight in weights:
            self._blocks.parameter(weight).requires_grad_()
        yield
        for weight in weights:
            gradient = self._blocks.parameter(weight).grad
            if gradient is not None and self._scales[weight.name].changes:  # None: no token went through it
                self._scales[weight.name].add_gradient(weight.view(gradient))
        for weight in weights:  # after all: experts share a parameter
            self._blocks.parameter(weight).requires_grad_(False).grad = None

    def _outer(self, grids: Grids | None) -> dict[str, Tensor]:
        """Decoded once for a minibatch: a tied embedding is used at both ends."""
        return {weight.name: self._decoded(weight, grids) for weight in (*self._entry, *self._exit)}

    @torch.no_grad()
    def _decoded(self, weight: Weight, grids: Grids | None) -> Tensor:
        return self._scales[weight.name].decoded(grids[weight.name] if grids else None)

    def _inside(self, index: int) -> list[Weight]:
        return [weight for weight in self._blocks.weights(index) if weight.name in self._scales]

    def _state(self, index: int, batch: Batch) -> Tensor:  # (samples, length, width)
        return self._states[index, : batch.ids.numel()].view(*batch.ids.shape, -1)
