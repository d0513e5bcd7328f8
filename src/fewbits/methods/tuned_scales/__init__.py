"""Scales tuned to what the model predicts: codes stay as a method chose them, and gradient descent moves the floating-point scales of all
weights together until the quantized model's next-token distribution is as close as it gets to the float model's.

So the scales of one weight can make up for the rounding errors of another, wherever it is. Tuned scales are judged on samples that were
held out, and dropped if the divergence there is not lower.

Tried on the embedded model at 2.5 and 4.8 bits per weight, KL on other text: the model's predictions as the target -21 and -16 %, the
output of each block by itself, which is cheaper, -8 % (2.5 bits); norms beside the scales one more percent, which not every file can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.methods.tuned_scales.scales import Scales, untunable
from fewbits.methods.tuned_scales.student import Student
from fewbits.model.walk import Batch, batches
from fewbits.progress import silent

if TYPE_CHECKING:
    from fewbits.formats import Format, Grid
    from fewbits.model.walk import Walk
    from fewbits.progress import Progress
    from fewbits.store.cache import Cache

RATE = 0.02  # change of a scale per step at the start, in units of its weight's relative rounding error: 8 bits need smaller steps than 2
STEP_TOKENS = 1024  # of a minibatch, or one sample if that is longer; with twice as many KL is 0.8 % lower, in twice the time
_HELD_OUT = 4  # every n-th minibatch is judged on and never trained on
_SEED = 0
_JUDGED = (10, 25, 50, 75)  # steps after which the held-out samples are looked at
_ATTEMPTS, _SLOWER = 3, 4  # each at a fourth of the rate before, where the held-out samples got worse
_KEPT = 10  # steps between two states in the cache, from where a run that was stopped goes on
_BETAS, _ADAM_EPSILON = (0.9, 0.99), 1e-16  # far below any gradient: that of one scale among millions may be 1e-9

STATE, _MOMENTS = "tuning", ("step", "exp_avg", "exp_avg_sq")  # as the optimizer names its own

Quantized = tuple["Format", Tensor, "Grid"]  # a weight: its format, codes, and the grid that maps them to values


@dataclass(frozen=True)
class Tuned:
    grids: dict[str, Grid]  # of every weight that was given, tuned or as it was
    before: float | None  # KL on held-out samples with the old grids
    after: float | None  # and with these; never more
    notes: tuple[str, ...] = ()


def minibatches(samples: Sequence[Sequence[int]]) -> list[Batch]:
    """Batches that are small enough for a step each."""
    return [part for batch in batches(samples) for part in batch.split(max(1, STEP_TOKENS // batch.ids.shape[1]))]


def tune(
    walk: Walk,
    quantized: Mapping[str, Quantized],
    steps: int,
    rate: float = RATE,
    progress: Progress[Any] = silent,
    cache: Cache | None = None,
) -> Tuned:
    """`walk`: of the float model, through `minibatches`. `cache`: of this model, these weights, samples and steps."""
    scales = {name: Scales(*weight) for name, weight in quantized.items()}
    notes, old = untunable(scales.values()), {name: entry.start for name, entry in scales.items()}
    held_out = walk.batches[1::_HELD_OUT]
    training = [batch for i, batch in enumerate(walk.batches) if i % _HELD_OUT != 1]
    if not any(entry.changes for entry in scales.values()):
        return Tuned(old, None, None, notes)
    if not held_out:
        return Tuned(old, None, None, (*notes, "scales not tuned: there is one minibatch only, and none to judge on"))
    student = Student(walk, scales, progress)
    before = after = student.divergence(held_out, old)
    order = _order(training, steps)
    for attempt in range(_ATTEMPTS):
        descent = _Descent(walk, scales, steps, rate / _SLOWER**attempt, cache.of(attempt=attempt) if cache else None)
        for batch in progress(order[descent.done :], steps - descent.done, "tuning scales"):
            # before the next step, so that a run which goes on from here looks too, and ends in the same bytes
            if descent.done in _JUDGED and (after := student.divergence(held_out)) > before:
                break
            descent.step(lambda batch=batch: student.add_gradient(batch))  # type: ignore[misc]
        else:
            grids = {name: entry.stored() for name, entry in scales.items()}
            if (after := student.divergence(held_out, grids)) < before:
                said = f"the scales of all weights were tuned together: held-out KL {before:.4g} -> {after:.4g}"
                return Tuned(grids, before, after, (*notes, said))
    return Tuned(old, before, before, (*notes, f"scales not tuned: the held-out KL {before:.4g} would become {after:.4g}"))


class _Descent:
    """Adam, at a rate that falls to zero, from the scales as they were; or from where a run that was stopped had come to."""

    def __init__(self, walk: Walk, scales: Mapping[str, Scales], steps: int, rate: float, cache: Cache | None) -> None:
        weights = {weight.name: weight for weight in walk.blocks.model.weights}
        moving = {name: entry for name, entry in scales.items() if entry.changes}
        self._rates = [rate * entry.rounding_error(walk.blocks.model.load(weights[name])) for name, entry in moving.items()]
        groups = [{"params": list(entry.changes.values()), "lr": 0.0} for entry in moving.values()]
        self._optimizer = torch.optim.Adam(groups, betas=_BETAS, eps=_ADAM_EPSILON)
        self._changes = {f"{name}:{part}": change for name, entry in moving.items() for part, change in entry.changes.items()}
        self._steps, self._cache = steps, cache
        self.done = self._resumed()

    def step(self, add_gradient: Callable[[], None]) -> None:
        for group, start in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = start * (1 - self.done / self._steps)
        self._optimizer.zero_grad()
        add_gradient()
        self._optimizer.step()
        self.done += 1
        if self._cache and self.done % _KEPT == 0:
            tensors = {f"change:{name}": change.detach() for name, change in self._changes.items()}
            for name, change in self._changes.items():
                tensors |= {f"{field}:{name}": value for field, value in self._optimizer.state[change].items()}
            self._cache.keep(STATE, {}, tensors, done=self.done)
            self._cache.drop(STATE, done=self.done - _KEPT)

    @torch.no_grad()
    def _resumed(self) -> int:
        """How many steps were done by a run that was stopped."""
        for change in self._changes.values():
            change.zero_()
        for done in range(self._steps - self._steps % _KEPT, 0, -_KEPT):
            if self._cache and (state := self._cache.find(STATE, done=done)):
                tensors = state.tensors
                for name, change in self._changes.items():
                    change.copy_(tensors[f"change:{name}"])
                    self._optimizer.state[change] = {field: tensors[f"{field}:{name}"].clone() for field in _MOMENTS}
                return done
        return 0


def _order(training: Sequence[Batch], steps: int) -> list[Batch]:
    """One minibatch a step, each used equally often."""
    generator, order = torch.Generator().manual_seed(_SEED), list[Batch]()
    while len(order) < steps:
        order += [training[i] for i in torch.randperm(len(training), generator=generator).tolist()]
    return order[:steps]
