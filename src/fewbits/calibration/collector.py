"""Statistics, one block of the model at a time: forward through all blocks, then backward through them, recomputing each.

In memory are the weights of one block, its statistics, and a batch; beyond a limit, statistics and hidden states are in mapped files. The
statistics of a block and the hidden states that the next one reads are cached as soon as the block is done: a run that was killed resumes
at the next block.

The backward pass starts from labels drawn from the model's own predictions: the squared gradient of such a loss is, in expectation, the
second derivative of the KL divergence to the model itself, which is what quantization will cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fewbits.calibration import folder, pooled
from fewbits.calibration.entry import Entry
from fewbits.calibration.passes import passes
from fewbits.calibration.recorders import (
    AnotherCacheError,
    GradientRecorder,
    Gradients,
    InputRecorder,
    KvRecorder,
    Watched,
    counting_experts,
    finished,
    watched,
)
from fewbits.model.walk import Walk, batches
from fewbits.progress import silent
from fewbits.store.cache import hash_of
from fewbits.store.heap import return_free_memory

if TYPE_CHECKING:
    from fewbits.calibration.statistics import InputStatistics
    from fewbits.model.blocks import Blocks
    from fewbits.model.weights import Weight
    from fewbits.progress import Progress
    from fewbits.store.cache import Cache, Result
    from fewbits.store.mapped import Room

    Sites = dict[str, tuple[InputStatistics, list[str]]]  # by name: what was read there, and by which weights
    Part = tuple[int, str, Result]  # block, which part of its statistics, and what is in it

STEPS = ("input", "hidden", "gradient", "back", "experts")  # of the cache
_SEED = 0  # of the labels
_FIELDS = 3  # raised when statistics get a new field or another meaning: results of before do not serve any more


class _Enough(Exception):  # noqa: N818 - not an error: the input of the output matrix was seen, and no logits are needed
    pass


class Collector:
    """Two passes over the samples. Each yields one block's results at a time, from the cache or computed now.

    On disk are the inputs of all blocks until the backward pass is through with them; without gradients, those of one block.
    """

    def __init__(
        self, blocks: Blocks, samples: Sequence[Sequence[int]], room: Room, cache: Cache, *, hessians: bool, gradients: bool
    ) -> None:
        self.blocks, self.hessians, self.gradients = blocks, hessians, gradients
        text, source = hash_of(samples), blocks.model.fingerprint
        self._cache = cache.of(source=source, text=text, hessians=hessians, gradients=gradients, seed=_SEED, fields=_FIELDS)
        self._walk = Walk(blocks, batches(samples), room)
        self.entry = Entry(self._walk, hessians)
        self._entered = self.entry.enter()
        self._output = room.new(self._entered.shape)  # of the block at hand, until it is in the cache
        self._joined: Tensor | None = None

    def blocks_in_cache(self) -> int:
        """Of how many blocks all statistics are in the cache."""
        kinds = ("input", "gradient") if self.gradients else ("input",)
        return sum(all(self._cache.has(kind, **self._keys(block)[0][2]) for kind in kinds) for block in range(len(self.blocks)))

    def forward(self, progress: Progress[int]) -> Iterator[Part]:
        """The inputs (values `readers` by site and `experts`) of each block, first to last; then of the output matrix as block
        len(blocks)."""
        count = len(self.blocks)
        for index in progress(range(count), count, "statistics, forward"):
            yield from self._parts("input", index, progress)
            if not self.gradients:
                self._cache.drop("hidden", block=index)
            return_free_memory()
        outer = finished(self.entry.inputs)
        output = self._cache.find("input", block=count) or self._keep_inputs({"block": count}, outer | self._output_sites(), {}, {})
        yield count, "", output

    def backward(self, progress: Progress[int]) -> Iterator[Part]:
        """The gradients of the weights of each block, last to first; before them those of the output matrix."""
        count = len(self.blocks)
        yield count, "", self._cache.find("gradient", block=count) or self._from_labels(progress)
        for index in progress(reversed(range(count)), count, "statistics, backward"):
            yield from self._parts("gradient", index, progress)
            self._cache.drop("back", block=index + 1)
            self._cache.drop("hidden", block=index + 1)
            return_free_memory()

    def _keys(self, index: int) -> list[tuple[str, list[Weight], dict[str, Any]]]:
        """Of each pass through this block: the part of the statistics that it makes, its weights, and the key of its result."""
        groups = passes(self.blocks.weights(index), self._walk.room_for_sums)
        if len(groups) == 1:
            return [("", groups[0], {"block": index})]
        keys = [{"block": index, "weights": hash_of([weight.name for weight in group])} for group in groups]
        return [(str(number or ""), group, key) for number, (group, key) in enumerate(zip(groups, keys, strict=True))]

    def _parts(self, kind: str, index: int, progress: Progress[int]) -> Iterator[Part]:
        """What the passes through one block recorded, and what its experts have in common."""
        make = self._forward if kind == "input" else self._backward
        keys = self._keys(index)
        found = [self._find(kind, part, key) for part, _, key in keys]
        known = [result for result in found if result is not None]
        results = known if len(known) == len(keys) else self._walk.until_it_fits(partial(make, index), progress)
        yield from ((index, part, result) for (part, _, _), result in zip(keys, results, strict=True))
        stacks = pooled.stacks_of(self.blocks.weights(index))
        if stacks:
            pool = self._cache.find("experts", block=index, kind=kind)
            if pool is None:
                values, tensors = pooled.of(results, stacks)
                pool = self._cache.keep("experts", values, tensors, block=index, kind=kind)
            yield index, pooled.PART, pool

    def _find(self, kind: str, part: str, key: dict[str, Any]) -> Result | None:
        return self._cache.find("experts", **key, kind=kind) if part else self._cache.find(kind, **key)

    def _keep(self, kind: str, part: str, key: dict[str, Any], values: dict[str, Any], tensors: dict[str, Tensor]) -> Result:
        if part:  # counted apart: progress goes by blocks
            return self._cache.keep("experts", values, tensors, **key, kind=kind)
        return self._cache.keep(kind, values, tensors, **key)

    def at_entry(self) -> tuple[dict[str, Gradients], dict[str, Gradients]]:
        """The gradients of what was looked up and of what was multiplied before the first block, after the backward pass."""
        return self.entry.gradients(self._back(0), self._walk.sums())

    def _hidden(self, index: int) -> Tensor:
        """What this block reads. If its file is gone or damaged, the block before is run again."""
        if index == 0:
            return self._entered
        if self._cache.find("hidden", block=index) is None:
            self._forward(index - 1)
        return self._with_given(self._state("hidden", index))

    def _with_given(self, changing: Tensor) -> Tensor:
        """What blocks are given beside the state that they change is stored once, not after every block."""
        if changing.shape == self._entered.shape:
            return changing
        if self._joined is None:
            self._joined = self._walk.room.new(self._entered.shape).copy_(self._entered)
        self._joined[:, : changing.shape[1]] = changing
        return self._joined

    def _back(self, index: int) -> Tensor:
        """The gradient of the loss at this block's input; at len(blocks), at the last block's output."""
        if self._cache.find("back", block=index) is None:
            self._backward(index) if index < len(self.blocks) else self._from_labels(silent)
        return self._state("back", index)

    def _state(self, kind: str, index: int) -> Tensor:
        result = self._cache.find(kind, block=index)
        assert result is not None, "it was just computed"
        return result.tensors["state"]

    def _forward(self, index: int) -> list[Result]:
        try:
            return self._recorded(index, KvRecorder())
        except AnotherCacheError:  # in its first batch: this block is no attention alone, and runs without a cache
            return self._recorded(index, None)

    def _recorded(self, index: int, kv: KvRecorder | None) -> list[Result]:
        hidden = self._hidden(index)
        results: list[Result] = []
        with self._walk.block(index) as block:
            for part, weights, key in self._keys(index):
                recorder = InputRecorder(watched(self.blocks, weights), self.hessians, self._walk.sums())
                experts = dict[str, Tensor]()
                if part:  # what the block gives is known by then, and products with other experts are left out
                    with recorder.attached(), self.blocks.experts_alone(weights):
                        block.run(hidden, None, recorder.next_batch)
                else:
                    with recorder.attached(), counting_experts(block.module, self.blocks.prefix(index), experts):
                        block.run(hidden, self._output, recorder.next_batch, kv)
                    self._cache.keep("hidden", {}, {"state": self._output[:, : self.blocks.layout.changing]}, block=index + 1)
                results.append(self._keep_inputs(key, finished(recorder), kv.ranges if kv and not part else {}, experts, part))
                del recorder  # its sums, before those of the next pass
                return_free_memory()
        return results

    def _keep_inputs(self, key: dict[str, Any], sites: Sites, kv: dict[str, Tensor], experts: dict[str, Tensor], part: str = "") -> Result:
        readers = {name: readers for name, (_, readers) in sites.items()}
        counts = {name: tokens.tolist() for name, tokens in experts.items()}
        tensors = {f"kv:{field}": tensor.contiguous() for field, tensor in kv.items()}
        for name in list(sites):  # sums are dropped as soon as they are packed
            tensors |= folder.packed({name: folder.input_fields(sites.pop(name)[0])})
        return self._keep("input", part, key, {"readers": readers, "experts": counts}, tensors)

    def _backward(self, index: int) -> list[Result]:
        hidden, gradient = self._hidden(index), self._back(index + 1)
        results: list[Result] = []
        with self._walk.block(index) as block:
            for part, weights, key in self._keys(index):
                recorder = GradientRecorder(watched(self.blocks, weights), weights, self.hessians, self._walk.sums())
                with recorder.attached(), torch.enable_grad():
                    for batch in self._walk.batches:
                        recorder.next_batch(batch)
                        x = batch.view(hidden).detach().requires_grad_()
                        (back,) = torch.autograd.grad(out := block.call(batch, x), x, batch.view(gradient).to(out.device))
                        if not part:
                            batch.view(self._output).copy_(back)
                for name in recorder.unmoved:  # it chooses (the best k of something), and a choice has no gradient: nothing is known
                    recorder.gradients.pop(name, None)
                if not part:
                    self._cache.keep("back", {}, {"state": self._output}, block=index)
                results.append(self._keep_gradients(key, recorder, part))
                del recorder
                return_free_memory()
        return results

    def _keep_gradients(self, key: dict[str, Any], recorder: GradientRecorder, part: str = "") -> Result:
        tensors: dict[str, Tensor] = {}
        for name in list(recorder.gradients):
            tensors |= folder.packed({name: recorder.gradients.pop(name).finished()})
        return self._keep("gradient", part, key, {}, tensors)

    @torch.no_grad()
    def _output_sites(self) -> Sites:
        modules, hidden = self._output_modules(), self._hidden(len(self.blocks))
        last = self._last(modules)
        recorder = InputRecorder(Watched(modules), self.hessians, self._walk.sums())

        def enough(*_: Any) -> None:
            raise _Enough

        with recorder.attached():
            handles = [modules[name].register_forward_pre_hook(enough) for name in last]
            for batch in self._walk.batches:
                recorder.next_batch(batch)
                with suppress(_Enough):
                    self.blocks.leave(batch.view(hidden))
            for handle in handles:
                handle.remove()
        return finished(recorder)

    def _from_labels(self, progress: Progress[Any]) -> Result:
        """The gradient of the loss at the last block's output. One sample at a time: logits are wide."""
        modules, hidden = self._output_modules(), self._hidden(len(self.blocks))
        weights = [weight for weight in self.blocks.outer_weights if weight.name in modules]
        recorder = GradientRecorder(Watched(modules), weights, self.hessians, self._walk.sums())
        generator = torch.Generator().manual_seed(_SEED)
        with recorder.attached(), torch.enable_grad():
            for batch in progress(self._walk.batches, len(self._walk.batches), "statistics, loss"):
                for sample in batch.split(1):
                    recorder.next_batch(sample)
                    x = sample.view(hidden).requires_grad_()
                    logits = self.blocks.leave(x)
                    (back,) = torch.autograd.grad(logits, x, loss_gradient(logits.detach(), generator))
                    sample.view(self._output).copy_(back)
        self._cache.keep("back", {}, {"state": self._output}, block=len(self.blocks))
        return self._keep_gradients({"block": len(self.blocks)}, recorder)

    def _output_modules(self) -> dict[str, nn.Module]:
        """Outer matrices that multiply after the blocks: a separate output matrix, or the second role of a tied embedding."""
        modules = {}
        for weight in self.blocks.outer_weights:
            if weight in self.entry.multiplied:
                continue
            path = weight.tied_to if weight.kind == "embedding" else weight.name
            if path is not None and weight.expert is None and weight.kind != "convolution":
                modules[weight.name] = self.blocks.submodule(path)
        return modules

    def _last(self, modules: dict[str, nn.Module]) -> list[str]:
        """The one that is called last, found by a trial with one token."""
        called: list[str] = []
        handles = [module.register_forward_pre_hook(lambda *_, name=name: called.append(name)) for name, module in modules.items()]
        self.blocks.leave(self._entered[:1].unsqueeze(0))
        for handle in handles:
            handle.remove()
        return called[-1:]


def loss_gradient(logits: Tensor, generator: torch.Generator) -> Tensor:
    """d(-log p(label)) / d logits, with one label per position drawn from p. logits (1, length, vocabulary)."""
    p = logits.float().softmax(-1)
    cumulative = p.cumsum(-1)
    place = torch.rand(p.shape[:-1], generator=generator).to(p.device).unsqueeze(-1) * cumulative[..., -1:]
    label = torch.searchsorted(cumulative, place).clamp_(max=p.shape[-1] - 1)
    return p.scatter_add_(-1, label, torch.full_like(place, -1.0))
