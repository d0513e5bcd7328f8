"""Statistics, one block of the model at a time: forward through all blocks, then backward through them, recomputing each.

In memory are the weights of one block, its statistics, and a batch; the hidden states between blocks lie in a buffer that goes to
disk beyond a limit. The backward pass starts from labels drawn from the model's own predictions: the squared gradient of such a
loss is, in expectation, the second derivative of the KL divergence to the model itself, which is what quantization will cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fewbits.calibration.recording import (
    GradientRecorder,
    Gradients,
    InputRecorder,
    KvRecorder,
    Watched,
    counting_experts,
    finished,
    watched,
)

if TYPE_CHECKING:
    from fewbits.blocks import Blocks, Call
    from fewbits.calibration.statistics import InputStatistics
    from fewbits.progress import Progress

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


class Buffers:
    """Hidden states between blocks, (tokens, width) each: in memory up to a limit, in files that the system pages beyond it."""

    def __init__(self, folder: Path, tokens: int, width: int, limit: int) -> None:
        self._folder, self._shape, self._room = folder, (tokens, width), limit
        self._made = 0

    def new(self) -> Tensor:
        tokens, width = self._shape
        nbytes = 4 * tokens * width
        if nbytes <= self._room:
            self._room -= nbytes
            return torch.empty(self._shape)
        self._made += 1
        path = self._folder / f"hidden-{self._made:05}.bin"
        mapped = torch.from_file(str(path), shared=True, size=tokens * width, dtype=torch.float32)
        path.unlink()  # the mapping keeps it; nothing is left behind, however this ends
        return mapped.view(self._shape)


class _Enough(Exception):  # noqa: N818 - the input of the output matrix was seen: no logits are needed
    pass


class Collector:
    """Two passes over the samples. Each hands out one block's findings at a time and forgets them."""

    def __init__(
        self,
        blocks: Blocks,
        samples: Sequence[Sequence[int]],
        scratch: Path,
        *,
        hessians: bool,
        gradients: bool,
        memory: int,
        seed: int = 0,
    ) -> None:
        self.blocks, self.hessians, self.gradients, self.seed = blocks, hessians, gradients, seed
        self.batches = batches(samples)
        self.experts: dict[str, Tensor] = {}
        self.usage: dict[str, Tensor] = {}  # per embedding: how often each row was looked up
        self._calls: dict[tuple[int, ...], list[Call]] = {}
        self._buffers: Buffers | None = None
        self._scratch, self._memory = scratch, memory
        self._between: list[Tensor] = []  # what each block reads; with gradients all of them, else only the last

    @torch.no_grad()
    def forward(self, progress: Progress[int]) -> Iterator[tuple[int, dict[str, tuple[InputStatistics, list[str]]], dict[str, Tensor]]]:
        """(block, its sites and who reads them, its KV ranges), first to last; then the output matrix as block number len(blocks)."""
        hidden = self._embed()
        for index in progress(range(len(self.blocks)), len(self.blocks), "statistics, forward"):
            following = self._following(hidden)
            recorder = InputRecorder(watched(self.blocks, self.blocks.weights(index)), self.hessians)
            kv = KvRecorder()
            with ExitStack() as stack:
                block = stack.enter_context(self.blocks.filled(index))
                stack.enter_context(recorder.attached())
                stack.enter_context(counting_experts(block, self.blocks.prefix(index), self.experts))
                for batch in self.batches:
                    recorder.next_call(batch.half, *batch.ids.shape)
                    call = self._calls[tuple(batch.ids.shape)][index]
                    x = hidden[batch.where].view(*batch.ids.shape, -1)
                    out = self.blocks.run(block, x, call, kv if "past_key_values" in call else None)
                    following[batch.where] = out.reshape(-1, out.shape[-1])
            hidden = following
            yield index, finished(recorder), kv.ranges
        self._between.append(hidden)
        yield len(self.blocks), self._output_sites(hidden), {}

    def backward(self, progress: Progress[int]) -> Iterator[tuple[int, dict[str, Gradients]]]:
        """(block, what it found), last to first: the output matrix as number len(blocks), the embeddings as -1."""
        gradient, found = self._from_labels(self._between.pop(), progress)
        yield len(self.blocks), found
        count = len(self.blocks)
        for index in progress(reversed(range(count)), count, "statistics, backward"):
            hidden = self._between.pop()
            weights = self.blocks.weights(index)
            recorder = GradientRecorder(watched(self.blocks, weights), weights, self.hessians)
            with self.blocks.filled(index) as block, recorder.attached(), torch.enable_grad():
                for batch in self.batches:
                    recorder.next_call(batch.half, *batch.ids.shape)
                    shape = (*batch.ids.shape, hidden.shape[-1])
                    x = hidden[batch.where].view(shape).detach().requires_grad_()
                    out = self.blocks.run(block, x, self._calls[tuple(batch.ids.shape)][index])
                    (back,) = torch.autograd.grad(out, x, gradient[batch.where].view(shape))
                    gradient[batch.where] = back.reshape(-1, back.shape[-1])
            yield index, recorder.found
        yield -1, self._at_embeddings(gradient)

    def _embed(self) -> Tensor:
        hidden: Tensor | None = None
        with self._counting_lookups():
            for batch in self.batches:
                entered, calls = self.blocks.enter(batch.ids)
                self._calls.setdefault(tuple(batch.ids.shape), calls)
                if hidden is None or self._buffers is None:
                    tokens = self.batches[-1].where.stop
                    self._buffers = Buffers(self._scratch, tokens, entered.shape[-1], self._memory)
                    hidden = self._buffers.new()
                hidden[batch.where] = entered.reshape(-1, entered.shape[-1])
        assert hidden is not None
        return hidden

    def _following(self, hidden: Tensor) -> Tensor:
        """Where a block's output goes: a buffer of its own if it must be kept for the way back."""
        assert self._buffers is not None
        if not self.gradients:
            return hidden  # a batch is read before it is overwritten
        self._between.append(hidden)
        return self._buffers.new()

    def _output_sites(self, hidden: Tensor) -> dict[str, tuple[InputStatistics, list[str]]]:
        modules = self._output_modules()
        recorder = InputRecorder(Watched(modules), self.hessians)

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

    def _from_labels(self, hidden: Tensor, progress: Progress[Any]) -> tuple[Tensor, dict[str, Gradients]]:
        """The gradient of the loss at the last block's output. One sample at a time: logits are wide."""
        assert self._buffers is not None
        modules = self._output_modules()
        weights = [weight for weight in self.blocks.outer_weights if weight.name in modules]
        recorder = GradientRecorder(Watched(modules), weights, self.hessians)
        gradient, generator = self._buffers.new(), torch.Generator().manual_seed(self.seed)
        with recorder.attached(), torch.enable_grad():
            for batch in progress(self.batches, len(self.batches), "statistics, loss"):
                length = batch.ids.shape[1]
                recorder.next_call(batch.half, 1, length)
                for start in range(batch.where.start, batch.where.stop, length):
                    x = hidden[start : start + length].unsqueeze(0).requires_grad_()
                    logits = self.blocks.leave(x)
                    (back,) = torch.autograd.grad(logits, x, loss_gradient(logits.detach(), generator))
                    gradient[start : start + length] = back[0]
        return gradient, recorder.found

    def _at_embeddings(self, gradient: Tensor) -> dict[str, Gradients]:
        found = {}
        for weight in self.blocks.outer_weights:
            if weight.kind == "embedding" and weight.shape[1] == gradient.shape[1]:
                found[weight.name] = Gradients.of(weight, self.hessians)
                for batch in self.batches:
                    g = gradient[batch.where].view(*batch.ids.shape, -1)
                    found[weight.name].add(g, g.new_ones(*batch.ids.shape, 1), batch.half)
        return found

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
