"""What happens before the first block: rows of embeddings are looked up, and in some models multiplied with matrices of their own.

Lookups are seen where they happen, in `F.embedding`: a module may shift positions before and scale rows after it. In most models the state
that enters the first block is a sum of lookups, and the gradient at one is the gradient at the other. Where it is not (a scaled embedding,
a norm, a projection), the samples enter once more and the gradient goes on to the lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fewbits.calibration.recorders import GradientRecorder, Gradients, InputRecorder, New, watched

if TYPE_CHECKING:
    from fewbits.model.blocks import Blocks
    from fewbits.model.walk import Batch, Walk
    from fewbits.model.weights import Weight


class _Lookups(TorchFunctionMode):
    """While entered, shows every lookup in these embeddings to `see`, which may return other rows to go on with."""

    def __init__(self, tables: dict[str, Tensor], see: Callable[[str, Tensor, Tensor], Tensor]) -> None:  # name, ids, rows
        super().__init__()
        self._names = {id(table): name for name, table in tables.items()}
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = self._names.get(id(args[1])) if func is F.embedding and len(args) > 1 else None
        return out if name is None else self._see(name, args[0], out)


class Entry:
    """`usage`: per embedding, how often each row was looked up. `inputs`: of the matrices that are multiplied before the first block."""

    def __init__(self, walk: Walk, hessians: bool) -> None:
        self._walk, self._hessians = walk, hessians
        blocks = walk.blocks
        self._tables = {weight.name: weight for weight in blocks.outer_weights if weight.kind == "embedding"}
        self.multiplied = _multiplied(blocks)
        self.usage: dict[str, Tensor] = {}
        self.inputs = InputRecorder(watched(blocks, self.multiplied), hessians, walk.sums())

    def enter(self) -> Tensor:
        """The state that the first block reads."""

        def count(name: str, ids: Tensor, rows: Tensor) -> Tensor:
            seen = torch.bincount(ids.flatten(), minlength=self._tables[name].shape[0]).cpu()
            self.usage[name] = self.usage.get(name, torch.zeros_like(seen)) + seen
            return rows

        with self._looking(count), self.inputs.attached():
            return self._walk.enter(before=self.inputs.next_batch)

    def gradients(self, back: Tensor, new: New) -> tuple[dict[str, Gradients], dict[str, Gradients]]:
        """(of lookups, of matrices), from the gradient at the state that enters the first block."""
        lookups = {name: Gradients.of(self._tables[name], self._hessians, new) for name in self.usage}
        recorder = GradientRecorder(watched(self._walk.blocks, self.multiplied), self.multiplied, self._hessians, new)
        if not self.multiplied and self._is_sum(self._walk.batches[0].split(1)[0], back):
            for batch in self._walk.batches:
                for gradients in lookups.values():
                    _add(gradients, batch.view(back), batch.half)
            return lookups, {}
        with recorder.attached():
            for sample in (sample for batch in self._walk.batches for sample in batch.split(1)):  # positions are looked up once per batch
                recorder.next_batch(sample)
                for name, gradient in self._at_lookups(sample, back):
                    _add(lookups[name], gradient, sample.half)
        return lookups, recorder.gradients

    def _is_sum(self, sample: Batch, back: Tensor) -> bool:
        return all(torch.equal(gradient.cpu(), sample.view(back)) for _, gradient in self._at_lookups(sample, back))

    @torch.enable_grad()
    def _at_lookups(self, sample: Batch, back: Tensor) -> list[tuple[str, Tensor]]:
        looked_up: list[tuple[str, Tensor]] = []

        def remember(name: str, _: Tensor, rows: Tensor) -> Tensor:
            looked_up.append((name, rows.detach().requires_grad_()))
            return looked_up[-1][1]

        with self._looking(remember):
            state, _ = self._walk.blocks.enter(sample.ids)
        found = torch.autograd.grad(state, [rows for _, rows in looked_up], sample.view(back).to(state.device), allow_unused=True)
        return [(name, gradient) for (name, _), gradient in zip(looked_up, found, strict=True) if gradient is not None]

    @contextmanager
    def _looking(self, see: Callable[[str, Tensor, Tensor], Tensor]) -> Iterator[None]:
        with _Lookups({name: self._walk.blocks.parameter(weight) for name, weight in self._tables.items()}, see):
            yield


def _add(gradients: Gradients, gradient: Tensor, half: int) -> None:
    rows = gradient.reshape(*gradient.shape[:2], -1)
    gradients.add(rows, rows.new_ones(*rows.shape[:2], 1), half)


@torch.no_grad()
def _multiplied(blocks: Blocks) -> Sequence[Weight]:
    """The outer matrices that a sample is multiplied with on its way to the first block, found by a trial with one token."""
    called: list[str] = []
    some = [w for w in blocks.outer_weights if w.kind not in ("embedding", "convolution") and w.expert is None]
    handles = [blocks.submodule(weight.name).register_forward_pre_hook(lambda *_, name=weight.name: called.append(name)) for weight in some]
    try:
        if some:
            blocks.enter(torch.zeros(1, 1, dtype=torch.long))
    finally:
        for handle in handles:
            handle.remove()
    return [weight for weight in some if weight.name in called]
