"""Statistics, one block of the model at a time: forward through all blocks, then backward through them, recomputing each.

In memory are the weights of one block, its statistics, and a batch; the hidden states between blocks lie in files, and so do statistics
and states beyond a limit. What a block found, and the states that the next one needs, are kept as soon as the block is done: a run that
was killed goes on at that block.

The backward pass starts from labels drawn from the model's own predictions: the squared gradient of such a loss is, in expectation, the
second derivative of the KL divergence to the model itself, which is what quantization will cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fewbits.allocator import give_back
from fewbits.calibration import storing
from fewbits.calibration.recording import (
    GradientRecorder,
    Gradients,
    InputRecorder,
    KvRecorder,
    New,
    Watched,
    counting_experts,
    finished,
    watched,
)
from fewbits.kept import hash_of
from fewbits.progress import silent
from fewbits.spilled import Room

if TYPE_CHECKING:
    from fewbits.blocks import Blocks, Call
    from fewbits.calibration.statistics import InputStatistics
    from fewbits.kept import Kept, Result
    from fewbits.progress import Progress

    Sites = dict[str, tuple[InputStatistics, list[str]]]  # by name: what was read there, and by which weights

STEPS = ("input", "hidden", "gradient", "back")  # of what is kept
_BATCH_TOKENS = 2048  # enough rows for a matrix product to run at full speed


@dataclass(frozen=True)
class Batch:
    ids: Tensor  # (samples, length)
    half: int  # all its samples are of one half
    start: int  # where its tokens begin in the buffers

    @property
    def where(self) -> slice:
        return slice(self.start, self.start + self.ids.numel())


def batches(samples: Sequence[Sequence[int]]) -> list[Batch]:
    """Samples of one length and one half together: nothing is padded, as padding would be counted."""
    order = sorted(range(len(samples)), key=lambda i: (len(samples[i]), i % 2, i))
    found: list[Batch] = []
    start = 0
    while order:
        length, half = len(samples[order[0]]), order[0] % 2
        most = max(1, _BATCH_TOKENS // length)
        alike = [i for i in order[:most] if len(samples[i]) == length and i % 2 == half]
        found.append(Batch(torch.tensor([list(samples[i]) for i in alike]), half, start))
        start += length * len(alike)
        order = order[len(alike) :]
    return found


class _Enough(Exception):  # noqa: N818 - the input of the output matrix was seen: no logits are needed
    pass


class Collector:
    """Two passes over the samples. Each hands out what is kept of one block at a time: found there, or made now.

    On disk are the inputs of all blocks until the way back has passed them; without gradients those of one block.
    """

    def __init__(
        self,
        blocks: Blocks,
        samples: Sequence[Sequence[int]],
        scratch: Path,
        kept: Kept,
        *,
        hessians: bool,
        gradients: bool,
        memory: int,
        seed: int = 0,
    ) -> None:
        self.blocks, self.hessians, self.gradients, self.seed = blocks, hessians, gradients, seed
        self.batches = batches(samples)
        self.usage: dict[str, Tensor] = {}  # per embedding: how often each row was looked up
        self._kept = kept.of(source=blocks.model.fingerprint, text=hash_of(samples), hessians=hessians, gradients=gradients, seed=seed)
        self._calls: dict[tuple[int, ...], list[Call]] = {}
        self._scratch, self._left = scratch, memory
        self._entered = self._embed()

    def found(self) -> int:
        """Of how many blocks everything is there already."""
        kinds = ("input", "gradient") if self.gradients else ("input",)
        return sum(all(self._kept.has(kind, block=block) for kind in kinds) for block in range(len(self.blocks)))

    def forward(self, progress: Progress[int]) -> Iterator[tuple[int, Result]]:
        """(block, its inputs: values `readers` by site and `experts`), first to last; then the output matrix as block len(blocks)."""
        count = len(self.blocks)
        for index in progress(range(count), count, "statistics, forward"):
            yield index, self._kept.find("input", block=index) or self._forward(index)
            if not self.gradients:
                self._kept.drop("hidden", block=index)
            give_back()
        yield count, self._kept.find("input", block=count) or self._keep_inputs(count, self._output_sites(), {}, {})

    def backward(self, progress: Progress[int]) -> Iterator[tuple[int, Result]]:
        """(block, the gradients of its weights), last to first; the output matrix as number len(blocks)."""
        count = len(self.blocks)
        yield count, self._kept.find("gradient", block=count) or self._from_labels(progress)
        for index in progress(reversed(range(count)), count, "statistics, backward"):
            yield index, self._kept.find("gradient", block=index) or self._backward(index)
            self._kept.drop("back", block=index + 1)
            self._kept.drop("hidden", block=index + 1)
            give_back()

    def at_embeddings(self) -> dict[str, Gradients]:
        """The gradients of what was looked up, after the way back."""
        gradient, found = self._back(0), {}
        for weight in self.blocks.outer_weights:
            if weight.kind == "embedding" and weight.shape[1] == gradient.shape[1]:
                found[weight.name] = Gradients.of(weight, self.hessians)
                for batch in self.batches:
                    g = gradient[batch.where].view(*batch.ids.shape, -1)
                    found[weight.name].add(g, g.new_ones(*batch.ids.shape, 1), batch.half)
        return found

    def _hidden(self, index: int) -> Tensor:
        """What this block reads. A file that is gone or damaged is made again."""
        if index == 0:
            return self._entered
        if self._kept.find("hidden", block=index) is None:
            self._forward(index - 1)
        return self._state("hidden", index)

    def _back(self, index: int) -> Tensor:
        """The gradient of the loss at this block's input; at len(blocks), at the last one's output."""
        if self._kept.find("back", block=index) is None:
            self._backward(index) if index < len(self.blocks) else self._from_labels(silent)
        return self._state("back", index)

    def _state(self, kind: str, index: int) -> Tensor:
        found = self._kept.find(kind, block=index)
        assert found is not None, "it was just made"
        return found.tensors["state"]

    @torch.no_grad()
    def _forward(self, index: int) -> Result:
        hidden, following = self._hidden(index), self._spare
        recorder = InputRecorder(watched(self.blocks, self.blocks.weights(index)), self.hessians, self._room())
        kv, experts = KvRecorder(), dict[str, Tensor]()
        with ExitStack() as stack:
            block = stack.enter_context(self.blocks.filled(index))
            stack.enter_context(recorder.attached())
            stack.enter_context(counting_experts(block, self.blocks.prefix(index), experts))
            for batch in self.batches:
                recorder.next_call(batch.half, *batch.ids.shape)
                call = self._calls[tuple(batch.ids.shape)][index]
                x = hidden[batch.where].view(*batch.ids.shape, -1)
                out = self.blocks.run(block, x, call, kv if "past_key_values" in call else None)
                following[batch.where] = out.reshape(-1, out.shape[-1])
        self._kept.keep("hidden", {}, {"state": following}, block=index + 1)
        return self._keep_inputs(index, finished(recorder), kv.ranges, experts)

    def _keep_inputs(self, block: int, sites: Sites, kv: dict[str, Tensor], experts: dict[str, Tensor]) -> Result:
        tensors = storing.packed({name: storing.input_fields(found) for name, (found, _) in sites.items()} | {"kv": kv})
        readers = {name: readers for name, (_, readers) in sites.items()}
        counts = {name: found.tolist() for name, found in experts.items()}
        return self._kept.keep("input", {"readers": readers, "experts": counts}, tensors, block=block)

    def _backward(self, index: int) -> Result:
        hidden, gradient, back = self._hidden(index), self._back(index + 1), self._spare
        weights = self.blocks.weights(index)
        recorder = GradientRecorder(watched(self.blocks, weights), weights, self.hessians, self._room())
        with self.blocks.filled(index) as block, recorder.attached(), torch.enable_grad():
            for batch in self.batches:
                recorder.next_call(batch.half, *batch.ids.shape)
                shape = (*batch.ids.shape, hidden.shape[-1])
                x = hidden[batch.where].view(shape).detach().requires_grad_()
                out = self.blocks.run(block, x, self._calls[tuple(batch.ids.shape)][index])
                (at_input,) = torch.autograd.grad(out, x, gradient[batch.where].view(shape))
                back[batch.where] = at_input.reshape(-1, at_input.shape[-1])
        return self._keep_gradients(index, back, recorder)

    def _keep_gradients(self, block: int, back: Tensor, recorder: GradientRecorder) -> Result:
        self._kept.keep("back", {}, {"state": back}, block=block)
        fields = {name: vars(gradient) for name, gradient in recorder.found.items()}
        return self._kept.keep("gradient", {}, storing.packed(fields), block=block)

    def _room(self) -> New:
        """For the statistics of one block."""
        return Room(self._scratch, self._left).new

    @torch.no_grad()
    def _embed(self) -> Tensor:
        hidden: Tensor | None = None
        with self._counting_lookups():
            for batch in self.batches:
                entered, calls = self.blocks.enter(batch.ids)
                self._calls.setdefault(tuple(batch.ids.shape), calls)
                if hidden is None:
                    shape = self.batches[-1].where.stop, entered.shape[-1]
                    room = Room(self._scratch, self._left)
                    hidden, self._spare = room.new(shape), room.new(shape)
                    self._left = max(0, self._left - hidden.nbytes - self._spare.nbytes)
                hidden[batch.where] = entered.reshape(-1, entered.shape[-1])
        assert hidden is not None
        return hidden

    @torch.no_grad()
    def _output_sites(self) -> Sites:
        modules, hidden = self._output_modules(), self._hidden(len(self.blocks))
        recorder = InputRecorder(Watched(modules), self.hessians, self._room())

        def enough(*_: Any) -> None:
            raise _Enough

        with recorder.attached():
            handles = [module.register_forward_pre_hook(enough) for module in modules.values()]
            for batch in self.batches:
                recorder.next_call(batch.half, *batch.ids.shape)
                with suppress(_Enough):
                    self.blocks.leave(hidden[batch.where].view(*batch.ids.shape, -1))
            for handle in handles:
                handle.remove()
        return finished(recorder)

    def _from_labels(self, progress: Progress[Any]) -> Result:
        """The gradient of the loss at the last block's output. One sample at a time: logits are wide."""
        modules, hidden = self._output_modules(), self._hidden(len(self.blocks))
        weights = [weight for weight in self.blocks.outer_weights if weight.name in modules]
        recorder = GradientRecorder(Watched(modules), weights, self.hessians, self._room())
        gradient, generator = self._spare, torch.Generator().manual_seed(self.seed)
        with recorder.attached(), torch.enable_grad():
            for batch in progress(self.batches, len(self.batches), "statistics, loss"):
                length = batch.ids.shape[1]
                recorder.next_call(batch.half, 1, length)
                for start in range(batch.where.start, batch.where.stop, length):
                    x = hidden[start : start + length].unsqueeze(0).requires_grad_()
                    logits = self.blocks.leave(x)
                    (back,) = torch.autograd.grad(logits, x, loss_gradient(logits.detach(), generator))
                    gradient[start : start + length] = back[0]
        return self._keep_gradients(len(self.blocks), gradient, recorder)

    def _output_modules(self) -> dict[str, nn.Module]:
        """Outer matrices that multiply: an output of its own, or the second role of a tied embedding."""
        found = {}
        for weight in self.blocks.outer_weights:
            path = weight.tied_to if weight.kind == "embedding" else weight.name
            if path is not None and weight.expert is None and weight.kind != "convolution":
                found[weight.name] = self.blocks.submodule(path)
        return found

    @contextmanager
    def _counting_lookups(self) -> Iterator[None]:
        handles = []
        for weight in self.blocks.outer_weights:
            if weight.kind != "embedding":
                continue

            def see(_: nn.Module, inputs: tuple[Any, ...], name: str = weight.name, rows: int = weight.shape[0]) -> None:
                seen = torch.bincount(inputs[0].flatten(), minlength=rows)
                self.usage[name] = self.usage.get(name, torch.zeros(rows, dtype=torch.int64)) + seen

            handles.append(self.blocks.submodule(weight.name).register_forward_pre_hook(see))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def loss_gradient(logits: Tensor, generator: torch.Generator) -> Tensor:
    """d(-log p(label)) / d logits, with one label per position drawn from p. logits (1, length, vocabulary)."""
    p = logits.float().softmax(-1)
    cumulative = p.cumsum(-1)
    place = torch.rand(p.shape[:-1], generator=generator).unsqueeze(-1) * cumulative[..., -1:]
    label = torch.searchsorted(cumulative, place).clamp_(max=p.shape[-1] - 1)
    return p.scatter_add_(-1, label, torch.full_like(place, -1.0))
