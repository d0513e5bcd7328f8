"""Scales tuned to a block's output: the codes stay as a method chose them, and gradient descent moves the floating-point scales until the
block's output is as close as it gets to that of the float model's block.

So the scales of one weight can make up for the rounding errors of another, and a later block for those of earlier ones. Tuned scales are
judged on samples that were held out, and dropped if the error there is not lower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits.formats.search import float16_scale
from fewbits.model.walk import Batch, batches

if TYPE_CHECKING:
    from fewbits.formats import Format, Grid
    from fewbits.model.walk import LoadedBlock, Walk
    from fewbits.model.weights import Weight

RATE = 0.03  # change of a scale per step at the start, in units of its weight's relative rounding error: 8 bits need smaller steps than 2
_STEP_TOKENS = 512  # of a minibatch, or one sample if that is longer: so many cost as much as decoding the block's weights
_HELD_OUT = 4  # every n-th minibatch is judged on and never trained on
_SEED = 0
_LEAST_CHANGE = 1e-12  # for a token that the block leaves as it is
_ADAM_EPSILON = 1e-16  # far below any gradient: that of one scale among millions may be 1e-9

Quantized = tuple["Format", Tensor, "Grid"]  # a weight: its format, codes (rows, cols), and what maps them to values


@dataclass(frozen=True)
class Tuned:
    grids: dict[str, Grid]  # of every weight that was given, tuned or as it was
    before: float  # error on held-out samples with the old grids
    after: float  # and with these; never more
    notes: tuple[str, ...] = ()


def minibatches(samples: Sequence[Sequence[int]]) -> list[Batch]:
    """Batches that are small enough for a step each."""
    return [part for batch in batches(samples) for part in batch.split(max(1, _STEP_TOKENS // batch.ids.shape[1]))]


def tune(
    walk: Walk, index: int, quantized: Mapping[str, Quantized], inputs: Tensor, targets: Tensor, steps: int, rate: float = RATE
) -> Tuned:
    """inputs and targets (tokens, width): what the block reads, and the output of the float model's block."""
    scales = {name: _Scales(*weight) for name, weight in quantized.items()}
    notes = _untunable(scales)
    old = {name: entry.start for name, entry in scales.items()}
    held_out, training = walk.batches[1::_HELD_OUT], [batch for i, batch in enumerate(walk.batches) if i % _HELD_OUT != 1]
    if not held_out:
        return Tuned(old, math.nan, math.nan, (*notes, "scales not tuned: there is one minibatch only, and none to judge on"))
    with walk.block(index) as block:
        trial = _Trial(block, scales, inputs, targets)
        before = trial.judge(held_out)
        if not any(entry.changes for entry in scales.values()):
            return Tuned(old, before, before, notes)
        trial.descend(training, steps, rate)
        grids = {name: entry.stored() for name, entry in scales.items()}
        after = trial.judge(held_out, grids)
    if not after < before:
        return Tuned(old, before, before, (*notes, f"scales not tuned: the held-out error {before:.4g} would become {after:.4g}"))
    return Tuned(grids, before, after, (*notes, f"the block's scales were tuned: held-out error {before:.4g} -> {after:.4g}"))


class _Scales:
    """The floating-point entries of one grid, times (1 + change): relative changes are of one size, whatever the scales are."""

    def __init__(self, fmt: Format, codes: Tensor, grid: Grid) -> None:
        self.fmt, self.codes, self.start = fmt, codes, grid
        self.changes = {
            name: torch.zeros_like(entry, dtype=torch.float32, requires_grad=True)
            for name, entry in grid.items()
            if entry.is_floating_point() and not fmt.is_cast
        }

    def decoded(self, grid: Grid) -> Tensor:  # (rows, cols)
        return self.fmt.decode(self.codes, grid)

    def moved(self) -> Grid:
        """With a graph back to the changes."""
        return self.start | {name: self.start[name].float() * (1 + change) for name, change in self.changes.items()}

    @torch.no_grad()
    def stored(self) -> Grid:
        """Moved, and rounded as the format stores it; the grid of the start itself if it has nothing to move."""
        if not self.changes:
            return self.start
        return {name: _stored(entry, self.start[name].dtype) if name in self.changes else entry for name, entry in self.moved().items()}


class _Trial:
    """One block with scales in it that move."""

    def __init__(self, block: LoadedBlock, scales: Mapping[str, _Scales], inputs: Tensor, targets: Tensor) -> None:
        self._block, self._blocks, self._scales, self._inputs, self._targets = block, block.walk.blocks, scales, inputs, targets
        self._weights = [weight for weight in self._blocks.weights(block.index) if weight.name in scales]
        self._rounding = {weight.name: self._rounding_error(weight) for weight in self._weights}  # now, while the block holds float values

    @torch.no_grad()
    def judge(self, batches: Sequence[Batch], grids: Mapping[str, Grid] | None = None) -> float:
        """The mean error of these tokens, with these grids or those of the start."""
        for weight in self._weights:
            entry = self._scales[weight.name]
            self._blocks.put(weight, entry.decoded(grids[weight.name] if grids else entry.start))
        return sum(float(self._errors(batch).double().sum()) for batch in batches) / sum(batch.ids.numel() for batch in batches)

    def descend(self, batches: Sequence[Batch], steps: int, rate: float) -> None:
        """Adam, one minibatch a step, each used equally often, at a rate that falls to zero."""
        rates = {weight.name: rate * self._rounding[weight.name] for weight in self._weights if self._scales[weight.name].changes}
        groups = [{"params": list(self._scales[name].changes.values()), "lr": start} for name, start in rates.items()]
        optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99), eps=_ADAM_EPSILON)
        generator, order = torch.Generator().manual_seed(_SEED), list[int]()
        for step in range(steps):
            order = order or torch.randperm(len(batches), generator=generator).tolist()
            for group, start in zip(optimizer.param_groups, rates.values(), strict=True):
                group["lr"] = start * (1 - step / steps)
            optimizer.zero_grad()
            self.add_gradient(batches[order.pop()])
            optimizer.step()

    @torch.enable_grad()
    def add_gradient(self, batch: Batch) -> None:
        """Back to the weights through the block, then from each weight to its scales."""
        moving = [(weight, entry.decoded(entry.moved())) for weight in self._weights if (entry := self._scales[weight.name]).changes]
        for weight, decoded in moving:
            self._blocks.put(weight, decoded.detach())
            self._blocks.parameter(weight).requires_grad_()
        self._errors(batch).mean().backward()
        for weight, decoded in moving:
            gradient = self._blocks.parameter(weight).grad
            if gradient is not None:  # None: no token went through it
                decoded.backward(weight.view(gradient))
        for weight, _ in moving:  # after all: experts share a parameter
            self._blocks.parameter(weight).requires_grad_(False).grad = None

    def _errors(self, batch: Batch) -> Tensor:  # (samples, length)
        """Squared, of each token, relative to what the block changes in it: massive activations at position 0 would drown all others."""
        x, target = batch.view(self._inputs), batch.view(self._targets)
        written = slice(self._blocks.layout.changing)
        error = (self._block.call(batch, x) - target)[..., written].square().sum(-1)
        return error / (target - x)[..., written].square().sum(-1).clamp(min=_LEAST_CHANGE)

    def _rounding_error(self, weight: Weight) -> float:
        """Of the whole weight, relative."""
        entry, w = self._scales[weight.name], weight.view(self._blocks.parameter(weight).detach())
        return float((entry.decoded(entry.start) - w).norm() / w.norm().clamp(min=_LEAST_CHANGE))


def _stored(entry: Tensor, dtype: torch.dtype) -> Tensor:
    return (float16_scale(entry) if dtype == torch.float16 else entry).to(dtype)


def _untunable(scales: Mapping[str, _Scales]) -> tuple[str, ...]:
    """One note for each format that has codes but no floating-point scale."""
    fixed = sorted({entry.fmt.name for entry in scales.values() if not entry.fmt.is_cast and not entry.changes})
    return tuple(f"scales of {name} are not tuned: it has none in floating point" for name in fixed)
