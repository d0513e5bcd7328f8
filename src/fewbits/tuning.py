"""Scales, tuned to a block's output: codes stay as a method chose them, and gradient descent moves the floating-point scales so
that the whole block gives what the float model's block gives.

Errors of one weight can so be made up for by the scales of another, and errors of earlier blocks by a later one. What is tuned is
judged on samples that it was not tuned to, and given up where it is no better there.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fewbits import formats, kernels
from fewbits import outcomes as kept_outcomes
from fewbits.calibration.collecting import Batch
from fewbits.calibration.collecting import batches as calibration_batches
from fewbits.fitting import float16_scale
from fewbits.kept import hash_of
from fewbits.progress import silent
from fewbits.rounding import decode
from fewbits.spilled import Room

if TYPE_CHECKING:
    from fewbits.blocks import Blocks, Call
    from fewbits.formats import Format, Grid
    from fewbits.kept import Kept
    from fewbits.methods import Outcome
    from fewbits.model import Model, Weight
    from fewbits.planning import Plan
    from fewbits.progress import Progress

STEPS = 200
RATE = 0.03  # change of a scale per step at the start, in units of its weight's own rounding error: 8 bits want a lighter hand than 2
_STEP_TOKENS = 512  # a step's minibatch, if samples are no longer: one of these costs as much as decoding the block's weights
_HELD_OUT = 4  # every n-th minibatch is judged on and never trained on
_SEED = 0
_LEAST_CHANGE = 1e-12  # a token that the block leaves as it is
_ADAM_EPSILON = 1e-16  # far below any gradient: that of one scale among millions may be 1e-9

Calls = Mapping[tuple[int, ...], "Sequence[Call]"]  # by the shape of the ids: what each block is called with
Quantized = tuple["Format", Tensor, "Grid"]  # a weight: its format, codes (rows, cols), and what maps them to values
Loss = Literal["relative", "plain"]


@dataclass(frozen=True)
class Tuned:
    grids: dict[str, Grid]  # of every weight that was given, tuned or as it was
    before: float  # error on held-out samples with the old grids
    after: float  # and with these; never more
    notes: tuple[str, ...] = ()


class _Scales:
    """The floating-point entries of one grid, times (1 + change): changes are of one size, whatever the scales are."""

    def __init__(self, fmt: Format, codes: Tensor, grid: Grid) -> None:
        self.fmt, self.codes, self.start = fmt, codes, grid
        self.changes = {
            name: torch.zeros_like(entry, dtype=torch.float32, requires_grad=True)
            for name, entry in grid.items()
            if entry.is_floating_point() and fmt.levels is not None
        }

    def decoded(self) -> Tensor:
        """(rows, cols), with a graph back to the changes."""
        return decode(self.codes, self.fmt.levels, *self.fmt.affine(self.start | self._moved()))

    def stored(self) -> Grid:
        if not self.changes:
            return self.start
        with torch.no_grad():
            return self.start | {name: _stored(entry, self.start[name].dtype) for name, entry in self._moved().items()}

    def _moved(self) -> Grid:
        return {name: self.start[name].float() * (1 + change) for name, change in self.changes.items()}


def tune(
    blocks: Blocks,
    index: int,
    quantized: Mapping[str, Quantized],
    inputs: Tensor,
    targets: Tensor,
    calls: Calls,
    batches: Sequence[Batch],
    steps: int = STEPS,
    rate: float = RATE,
    loss: Loss = "relative",
) -> Tuned:
    """inputs and targets (tokens, width): what the block reads, and what the float model's block gives, where `batches` say."""
    scales = {name: _Scales(*weight) for name, weight in quantized.items()}
    notes = _untunable(scales)
    old = {name: entry.start for name, entry in scales.items()}
    held_out, training = batches[1::_HELD_OUT], [batch for i, batch in enumerate(batches) if i % _HELD_OUT != 1]
    if not held_out:
        return Tuned(old, math.nan, math.nan, (*notes, "scales not tuned: there is one minibatch only, and none to judge on"))
    with _Trial(blocks, index, scales, inputs, targets, calls, loss).filled() as trial:
        before = trial.judge(held_out)
        if not any(entry.changes for entry in scales.values()):
            return Tuned(old, before, before, notes)
        trial.descend(training, steps, rate)
        grids = {name: entry.stored() for name, entry in scales.items()}
        after = trial.judge(held_out, grids)
    if not after < before:
        return Tuned(old, before, before, (*notes, f"scales not tuned: the held-out error {before:.4g} would become {after:.4g}"))
    return Tuned(grids, before, after, (*notes, f"the block's scales were tuned: held-out error {before:.4g} -> {after:.4g}"))


def errors(out: Tensor, x: Tensor, target: Tensor, loss: Loss = "relative") -> Tensor:  # (samples, length, width) -> (samples, length)
    """Squared, of each token. Relative to what the block changes in it: massive activations at position 0 would be all of a plain sum."""
    error = (out - target).square().sum(-1)
    return error if loss == "plain" else error / (target - x).square().sum(-1).clamp(min=_LEAST_CHANGE)


class _Trial:
    """One block with scales in it that move."""

    def __init__(
        self, blocks: Blocks, index: int, scales: Mapping[str, _Scales], inputs: Tensor, targets: Tensor, calls: Calls, loss: Loss
    ) -> None:
        self._blocks, self._index, self._scales = blocks, index, scales
        self._inputs, self._targets, self._calls, self._loss = inputs, targets, calls, loss
        self._weights = [weight for weight in blocks.weights(index) if weight.name in scales]

    @contextmanager
    def filled(self) -> Iterator[_Trial]:
        with self._blocks.filled(self._index) as self._block:
            self._rounding = {weight.name: self._rounding_error(weight) for weight in self._weights}
            try:
                yield self
            finally:
                for weight in self._weights:
                    self._blocks.parameter(weight).requires_grad_(False).grad = None

    @torch.no_grad()
    def judge(self, batches: Sequence[Batch], grids: Mapping[str, Grid] | None = None) -> float:
        """The mean error of these tokens, with these grids or those of the start."""
        for weight in self._weights:
            entry = self._scales[weight.name]
            self._blocks.put(weight, _decoded(entry.fmt, entry.codes, grids[weight.name] if grids else entry.start))
        return sum(float(self._errors(batch).double().sum()) for batch in batches) / sum(batch.ids.numel() for batch in batches)

    def descend(self, batches: Sequence[Batch], steps: int, rate: float) -> None:
        """Adam, one minibatch a step, each as often as any other, at a rate that falls to zero."""
        rates = {weight.name: rate * self._rounding[weight.name] for weight in self._weights if self._scales[weight.name].changes}
        groups = [{"params": list(self._scales[name].changes.values()), "lr": start} for name, start in rates.items()]
        optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99), eps=_ADAM_EPSILON)
        generator, order = torch.Generator().manual_seed(_SEED), list[int]()
        for step in range(steps):
            order = order or torch.randperm(len(batches), generator=generator).tolist()
            for group, start in zip(optimizer.param_groups, rates.values(), strict=True):
                group["lr"] = start * (1 - step / steps)
            optimizer.zero_grad()
            self._add_gradient(batches[order.pop()])
            optimizer.step()

    @torch.enable_grad()
    def _add_gradient(self, batch: Batch) -> None:
        """Back to the weights through the block, then from each weight to its scales."""
        moving = [(weight, self._scales[weight.name].decoded()) for weight in self._weights if self._scales[weight.name].changes]
        for weight, decoded in moving:
            self._blocks.put(weight, decoded.detach())
            self._blocks.parameter(weight).requires_grad_().grad = None
        self._errors(batch).mean().backward()
        for weight, decoded in moving:
            gradient = self._blocks.parameter(weight).grad
            if gradient is not None:  # None: nothing went through it
                decoded.backward(weight.view(gradient))

    def _errors(self, batch: Batch) -> Tensor:
        shape = (*batch.ids.shape, self._inputs.shape[-1])
        x, target = self._inputs[batch.where].view(shape), self._targets[batch.where].view(shape)
        out = self._blocks.run(self._block, x, self._calls[tuple(batch.ids.shape)][self._index])
        return errors(out, x, target, self._loss)

    def _rounding_error(self, weight: Weight) -> float:
        """Of the whole weight, relative: read before the float values give way to decoded ones."""
        entry, w = self._scales[weight.name], weight.view(self._blocks.parameter(weight).detach())
        return float((_decoded(entry.fmt, entry.codes, entry.start) - w).norm() / w.norm().clamp(min=_LEAST_CHANGE))


def tuned_outcomes(
    model: Model,
    plan: Plan,
    samples: Sequence[Sequence[int]],
    outcomes: Mapping[str, Outcome],
    memory: int = 1 << 30,
    steps: int = STEPS,
    progress: Progress[int] = silent,
    scratch: Path | None = None,
    kept: Kept | None = None,
) -> Iterator[tuple[Weight, Outcome]]:
    """Every weight: those outside of blocks as they are, then block after block, each tuned on what the tuned ones before it give.

    `memory` is for hidden states, the float model's and the quantized one's; beyond it they go to files in `scratch`. What is to be
    said of a block is in the notes of its first weight. `kept`: finished blocks, for the next run to go on from; it takes the hidden
    states through them once more, which costs what a few of the steps cost.
    """
    from fewbits.blocks import Blocks

    blocks = Blocks(model)
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".fewbits-") as folder:
        walk = _Walk(blocks, samples, Path(folder), memory)
        walk.enter({weight.name: _value(weight, plan, outcomes) for weight in blocks.outer_weights})
        yield from ((weight, outcomes[weight.name]) for weight in blocks.outer_weights)
        before = hash_of([samples, steps, [(entry.weight, entry.format, entry.method) for entry in plan.entries]])
        for index in progress(range(len(blocks)), len(blocks), "tuning scales"):
            weights = blocks.weights(index)
            if done := _finished(kept, weights, before):
                walk.advance_reference(index)
                walk.advance_quantized(index, {weight.name: _value(weight, plan, done) for weight in weights})
                yield from ((weight, done[weight.name]) for weight in weights)
                continue
            quantized = {}
            for weight in weights:
                fmt = formats.get(plan[weight.name].format)
                quantized[weight.name] = (fmt, *fmt.unpack(outcomes[weight.name].parts))
            walk.advance_reference(index)
            tuned = tune(blocks, index, quantized, walk.quantized, walk.reference, walk.calls, walk.batches, steps)
            walk.advance_quantized(index, {name: _decoded(fmt, codes, tuned.grids[name]) for name, (fmt, codes, _) in quantized.items()})
            for weight in weights:
                outcome, (fmt, codes, start), grid = outcomes[weight.name], quantized[weight.name], tuned.grids[weight.name]
                parts = outcome.parts if grid is start else kernels.pack(fmt, codes, grid)
                notes = tuned.notes if weight is weights[0] else ()
                whole = replace(outcome, parts=parts, notes=(*outcome.notes, *notes))
                if kept:
                    kept_outcomes.keep(kept, "tuned", whole, weight=weight.name, before=before)
                yield weight, whole


def _finished(kept: Kept | None, weights: Sequence[Weight], before: str) -> dict[str, Outcome] | None:
    """A block's weights, if all of them are there."""
    found = {weight.name: kept.find("tuned", weight=weight.name, before=before) if kept else None for weight in weights}
    return {name: kept_outcomes.restored(result) for name, result in found.items() if result} if all(found.values()) else None


class _Walk:
    """The hidden states of two models side by side: the float one, and the quantized one as far as it is tuned."""

    def __init__(self, blocks: Blocks, samples: Sequence[Sequence[int]], scratch: Path, memory: int) -> None:
        self.blocks, self.batches = blocks, minibatches(samples)
        self.calls: dict[tuple[int, ...], list[Call]] = {}
        self._scratch, self._memory = scratch, memory

    @torch.no_grad()
    def enter(self, outer: Mapping[str, Tensor]) -> None:
        """`outer`: embeddings, and what else the quantized model holds outside of blocks."""
        tokens = self.batches[-1].where.stop
        self.reference, self.quantized = torch.empty(0), torch.empty(0)
        parameters = {weight.parameter: self.blocks.parameter(weight) for weight in self.blocks.outer_weights}
        kept = {name: parameter.data for name, parameter in parameters.items()}
        for batch in self.batches:
            hidden, calls = self.blocks.enter(batch.ids)
            self.calls.setdefault(tuple(batch.ids.shape), calls)
            if not self.reference.numel():
                room = Room(self._scratch, self._memory)
                self.reference, self.quantized = (room.new((tokens, hidden.shape[-1])) for _ in range(2))
            self.reference[batch.where] = hidden.reshape(-1, hidden.shape[-1])
        try:
            for weight in self.blocks.outer_weights:
                if weight.expert == 0:  # all of the stack are put one by one, and not into what is kept
                    parameters[weight.parameter].data = torch.empty_like(kept[weight.parameter])
                self.blocks.put(weight, outer[weight.name])
            for batch in self.batches:
                self.quantized[batch.where] = self.blocks.enter(batch.ids)[0].reshape(-1, self.quantized.shape[-1])
        finally:
            for name, parameter in parameters.items():
                parameter.data = kept[name]

    def advance_reference(self, index: int) -> None:
        self._advance(index, self.reference, {})

    def advance_quantized(self, index: int, decoded: Mapping[str, Tensor]) -> None:
        self._advance(index, self.quantized, decoded)

    @torch.no_grad()
    def _advance(self, index: int, hidden: Tensor, decoded: Mapping[str, Tensor]) -> None:
        with self.blocks.filled(index) as block:
            for weight in self.blocks.weights(index):
                if weight.name in decoded:
                    self.blocks.put(weight, decoded[weight.name])
            for batch in self.batches:
                x = hidden[batch.where].view(*batch.ids.shape, -1)
                out = self.blocks.run(block, x, self.calls[tuple(batch.ids.shape)][index])
                hidden[batch.where] = out.reshape(-1, out.shape[-1])


def minibatches(samples: Sequence[Sequence[int]]) -> list[Batch]:
    """Calibration's batches in pieces small enough for a step each."""
    found: list[Batch] = []
    for batch in calibration_batches(samples):
        length = batch.ids.shape[1]
        for ids in batch.ids.split(max(1, _STEP_TOKENS // length)):
            found.append(Batch(ids, batch.half, found[-1].where.stop if found else 0))
    return found


def _value(weight: Weight, plan: Plan, outcomes: Mapping[str, Outcome]) -> Tensor:
    return kernels.decode(formats.get(plan[weight.name].format), outcomes[weight.name].parts, weight.shape)


def _decoded(fmt: Format, codes: Tensor, grid: Grid) -> Tensor:
    return decode(codes, fmt.levels, *fmt.affine(grid))


def _stored(entry: Tensor, dtype: torch.dtype) -> Tensor:
    return (float16_scale(entry) if dtype == torch.float16 else entry).to(dtype)


def _untunable(scales: Mapping[str, _Scales]) -> tuple[str, ...]:
    """One note for each format that has codes but no floating-point scale."""
    fixed = sorted({entry.fmt.name for entry in scales.values() if entry.fmt.levels is not None and not entry.changes})
    return tuple(f"scales of {name} are not tuned: it has none in floating point" for name in fixed)
