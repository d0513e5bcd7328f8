"""What flows through a module, recorded: inputs of its weights, gradients of their outputs, keys and values, experts chosen.

The weight of a module is watched by a hook, that of an expert by the products with its slice of the parameter that holds all experts.
The first token of a sample is recorded apart from the others, as its activations are often hundreds of times as large. An expert reads
only the tokens that were routed to it, so which of these are first is looked up for each product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbits.calibration import gram, output_moments
from fewbits.calibration.moments import Moments
from fewbits.calibration.statistics import InputStatistics
from fewbits.formats.storage.codes import to_float16
from fewbits.model.experts import Product, Products

if TYPE_CHECKING:
    from fewbits.model.blocks import Blocks
    from fewbits.model.walk import Batch, Walk
    from fewbits.model.weights import Weight

DRAWN_PER_SAMPLE, _STRIDE = 8, 59  # inputs that are stored unsummed, at positions that differ from sample to sample
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
New = Callable[[Sequence[int]], Tensor]  # a zero tensor of this shape; `Room.new` maps those that exceed the memory limit


@dataclass
class Site:
    """What one input tensor looked like, while it is being recorded."""

    readers: list[str]
    cols: int
    hessian: bool
    new: New = torch.zeros
    halves: tuple[Moments, Moments] = field(init=False)
    first: list[Tensor] = field(default_factory=list)
    first_half: list[int] = field(default_factory=list)
    extremes: list[Tensor] = field(default_factory=list)
    some: list[Tensor] = field(default_factory=list)
    some_half: list[int] = field(default_factory=list)
    _moment: Tensor | None = None  # allocated at first use: an expert that no token is routed to takes no memory until the end

    def __post_init__(self) -> None:
        self.halves = (Moments(self.cols), Moments(self.cols))

    @property
    def moment(self) -> Tensor | None:
        if self.hessian and self._moment is None:
            self._moment = self.new((2, self.cols, self.cols))
        return self._moment

    def add(self, x: Tensor, half: int) -> None:  # x (batch, length, cols)
        drawn = x[:, :0]
        if x.shape[1] > 1:
            places = [(step * _STRIDE + len(self.first_half) + len(x)) % (x.shape[1] - 1) + 1 for step in range(DRAWN_PER_SAMPLE)]
            drawn = x[:, torch.tensor(places)]
        self._add(x[:, 0].clone(), x[:, 1:].reshape(-1, self.cols), drawn.reshape(-1, self.cols), half)

    def add_tokens(self, x: Tensor, is_first: Tensor, half: int, samples: int) -> None:  # x (tokens, cols), is_first (tokens,)
        """Some tokens of a batch of this many samples."""
        later = x[~is_first]
        step = max(1, len(later) // (DRAWN_PER_SAMPLE * samples))
        self._add(x[is_first], later, later[::step][: DRAWN_PER_SAMPLE * samples], half)

    def _add(self, first: Tensor, later: Tensor, drawn: Tensor, half: int) -> None:
        if not len(first) + len(later):
            return
        self.first.append(first.cpu())
        self.first_half += [half] * len(first)
        each = [torch.stack(torch.aminmax(part)) for part in (first, later) if len(part)]
        low, high = torch.stack(each).unbind(1)
        self.extremes.append(torch.stack([low.min(), high.max()]).cpu())
        self.some.append(to_float16(drawn).cpu())
        self.some_half += [half] * len(drawn)
        self.halves[half].add(later)
        if self.moment is not None:
            gram.add(self.moment[half], later)

    def finished(self) -> InputStatistics:
        a, b = self.halves
        first = torch.cat([torch.empty(0, self.cols), *self.first])
        low, high = torch.stack([a.low, b.low]), torch.stack([a.high, b.high])
        both = Moments(self.cols)
        for half in (0, 1):  # ranges and histogram are of all positions
            firsts = Moments(self.cols)
            firsts.add(first[[row for row, of in enumerate(self.first_half) if of == half]])
            low[half], high[half] = torch.minimum(low[half], firsts.low), torch.maximum(high[half], firsts.high)
            both.merge(firsts)
        both.merge(a)
        both.merge(b)
        empty = [not (halves.count or half in self.first_half) for half, halves in enumerate(self.halves)]
        if any(empty) and not all(empty):
            low[empty.index(True)], high[empty.index(True)] = both.low, both.high
        return InputStatistics(
            count=torch.tensor([a.count, b.count]),
            total=torch.stack([a.sum, b.sum]),
            square=torch.stack([a.sum_squares, b.sum_squares]),
            low=low,
            high=high,
            first=first,
            first_half=torch.tensor(self.first_half, dtype=torch.uint8),
            extremes=torch.stack(self.extremes) if self.extremes else torch.empty(0, 2),
            some=torch.cat([torch.empty(0, self.cols, dtype=torch.float16), *self.some]),
            some_half=torch.tensor(self.some_half, dtype=torch.uint8),
            histogram=both.histogram,
            moment=None if self.moment is None else gram.mirror(self.moment).cpu(),
        )


@dataclass(frozen=True)
class Watched:
    """Weights of a block or of the output, and where their inputs can be seen."""

    modules: dict[str, nn.Module]  # by weight: what multiplies with it
    experts: dict[str, Weight] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)  # by name: those that hold the experts


def watched(blocks: Blocks, weights: Sequence[Weight]) -> Watched:
    """Those of these weights whose inputs can be seen."""
    experts = {weight.name: weight for weight in weights if weight.expert is not None}
    modules = {weight.name: blocks.submodule(weight.name) for weight in weights if weight.expert is None}
    return Watched(
        {name: module for name, module in modules.items() if _has_one_input(module)},
        experts,
        {expert.parameter: blocks.parameter(expert) for expert in experts.values()},
    )


def _has_one_input(module: nn.Module) -> bool:
    """Each group of a grouped convolution reads other inputs: there are no second moments that all its rows share. A table is looked up."""
    return not isinstance(module, nn.Embedding) and (not isinstance(module, _CONVOLUTIONS) or module.groups == 1)


def _is_product(module: nn.Module, x: Tensor, output: Any) -> bool:
    """Whether the output is the product with the module's weight and nothing else: a router may return several tensors, and some linear
    layers multiply groups of channels with parts of the weight."""
    if not isinstance(output, Tensor):
        return False
    weight = module._parameters["weight"]
    return isinstance(module, _CONVOLUTIONS) or (weight is not None and output.shape[-1] * x.shape[-1] == weight.numel())


class _Recorder:
    """Hooks and watched products while inside `attached`. Each batch is announced with `next_batch`."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._batch: Batch
        self._products: Products | None = None

    @contextmanager
    def attached(self) -> Iterator[Self]:
        # made here, as it goes by the addresses of the parameters, which change whenever a block is filled
        self._products = Products(self._watched.parameters, self._see_product) if self._watched.parameters else None
        handles = [self._attach(name, module) for name, module in self._watched.modules.items()]
        try:
            with self._products or nullcontext():
                yield self
        finally:
            for handle in handles:
                handle.remove()

    def next_batch(self, batch: Batch) -> None:
        self._batch = batch
        if self._products:
            self._products.next_call(batch.ids.numel())

    def _is_first(self, product: Product) -> Tensor:
        """Of each token of an expert: whether it is the first of its sample. Where that is not known, it counts as a later one."""
        if product.tokens is None:
            return torch.zeros(len(product.x), dtype=torch.bool, device=product.x.device)
        return product.tokens % self._batch.ids.shape[1] == 0

    def _attach(self, name: str, module: nn.Module) -> Any:
        raise NotImplementedError

    def _see_product(self, product: Product) -> None:
        raise NotImplementedError


class InputRecorder(_Recorder):
    """What every weight reads. Weights that read the same tensor share one site; each expert has one to itself."""

    def __init__(self, watched: Watched, hessians: bool, new: New = torch.zeros) -> None:
        super().__init__(watched)
        self._hessians, self._new = hessians, new
        self.sites = {name: Site([name], expert.shape[1], hessians, new) for name, expert in watched.experts.items()}
        self._held: list[tuple[Tensor, str]] = []  # inputs of this batch: held, so that no later tensor is taken for one of them

    def next_batch(self, batch: Batch) -> None:
        super().next_batch(batch)
        self._held.clear()

    def _attach(self, name: str, module: nn.Module) -> Any:
        def see(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            x: Tensor = inputs[0]
            shared = next((site for tensor, site in self._held if tensor is x), None)
            if shared is not None:
                if name not in self.sites[shared].readers:
                    self.sites[shared].readers.append(name)
                return
            self._held.append((x, name))
            read = inputs_of(module, x)
            if name not in self.sites:
                self.sites[name] = Site([name], read.shape[-1], self._hessians, self._new)
            self.sites[name].add(read, self._batch.half)

        return module.register_forward_pre_hook(see)

    def _see_product(self, product: Product) -> None:
        if site := self.sites.get(product.weight):  # else it is recorded in another pass
            site.add_tokens(product.x, self._is_first(product), self._batch.half, len(self._batch.ids))


@dataclass
class Gradients:
    """How one weight's output moves the loss, while it is being recorded. Fields as in WeightStatistics."""

    sensitivity: Tensor
    gradient_square: Tensor
    fisher_square: Tensor
    fisher: Tensor | None
    outputs: Tensor | None

    def finished(self) -> dict[str, Any]:
        """Its fields, off the device."""
        if self.fisher is not None:
            self.fisher_square = gram.mirror(self.fisher).diagonal(dim1=1, dim2=2).cpu().double()
        if self.outputs is not None:
            output_moments.mirror(self.outputs)
        return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in vars(self).items()}

    @staticmethod
    def of(weight: Weight, hessian: bool, new: New = torch.zeros) -> Gradients:
        rows, cols = weight.shape
        fisher = new((2, cols, cols)) if hessian else None
        return Gradients(_doubles(2), _doubles(rows), _doubles(cols), fisher, output_moments.zeros(weight, new) if hessian else None)

    def add(self, x: Tensor, gradient: Tensor, half: int) -> None:  # (batch, length, cols) and (batch, length, rows)
        self._add(x.flatten(0, 1), gradient.flatten(0, 1), half, lambda each: (each.view(x.shape[:2])[:, 0], each.view(x.shape[:2])[:, 1:]))

    def add_tokens(self, x: Tensor, gradient: Tensor, is_first: Tensor, half: int) -> None:  # (tokens, cols), (tokens, rows), (tokens,)
        here = is_first.cpu()
        self._add(x, gradient, half, lambda each: (each[here], each[~here]))

    def _add(self, x: Tensor, gradient: Tensor, half: int, apart: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        """`apart`: of something that each token has, what the first tokens of samples have and what the others have."""
        norm = torch.linalg.vector_norm(gradient, dim=-1)
        root = norm / gradient.shape[-1] ** 0.5  # the square root of w_t, the mean over outputs of g^2
        first, later = apart(root.cpu().double().square())  # not every device has float64
        self.sensitivity[half] += torch.stack([first.reshape(-1).sum(), later.reshape(-1).sum()])
        self.gradient_square[half] += torch.linalg.vector_norm(gradient, dim=0).cpu().double().square()
        scaled = x * root.unsqueeze(-1)
        if self.fisher is None:
            self.fisher_square[half] += torch.linalg.vector_norm(scaled, dim=0).cpu().double().square()
        else:  # of which it is the diagonal
            gram.add(self.fisher[half], scaled)
        if self.outputs is not None:
            output_moments.add(self.outputs[half], gradient, norm)


def _doubles(count: int) -> Tensor:
    return torch.zeros(2, count, dtype=torch.float64)


class GradientRecorder(_Recorder):
    """Every weight's output gradient beside its input."""

    def __init__(self, watched: Watched, weights: Sequence[Weight], hessians: bool, new: New = torch.zeros) -> None:
        super().__init__(watched)
        seen = [weight for weight in weights if weight.name in watched.modules or weight.name in watched.experts]
        self.gradients = {weight.name: Gradients.of(weight, hessians, new) for weight in seen}
        self.unmoved = set(watched.modules)  # no gradient has come to the output of these

    def _attach(self, name: str, module: nn.Module) -> Any:
        def see(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if not _is_product(module, inputs[0], output):
                self.gradients.pop(name, None)
                return
            x, half = inputs_of(module, inputs[0].detach()), self._batch.half

            def on_gradient(gradient: Tensor) -> None:
                self.unmoved.discard(name)
                self.gradients[name].add(x, outputs_of(module, gradient).reshape(*x.shape[:2], -1), half)

            output.register_hook(on_gradient)

        return module.register_forward_hook(see)

    def _see_product(self, product: Product) -> None:
        if (into := self.gradients.get(product.weight)) is None:
            return
        is_first, half = self._is_first(product), self._batch.half
        product.on_gradient(lambda gradient: into.add_tokens(product.x, gradient, is_first, half))


def inputs_of(module: nn.Module, x: Tensor) -> Tensor:
    """(batch, length, cols): what each output of the module is a product with; of a convolution, the patches that its kernel covers."""
    if not isinstance(module, _CONVOLUTIONS):
        return x.detach().reshape(x.shape[0], -1, x.shape[-1])
    x = x.detach()
    sides = len(module.kernel_size)
    if x.dim() == sides + 1:
        x = x.unsqueeze(0)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = F.pad(x, module._reversed_padding_repeated_twice, mode)
    for side in range(sides):
        size, step, gap = module.kernel_size[side], module.stride[side], module.dilation[side]
        x = x.unfold(2 + side, (size - 1) * gap + 1, step)[..., ::gap]
    batch, channels, *places = x.shape[: 2 + sides]
    return x.movedim(1, 1 + sides).reshape(batch, math.prod(places), channels * math.prod(module.kernel_size))


def outputs_of(module: nn.Module, y: Tensor) -> Tensor:
    """(..., rows), in the order of `inputs_of`."""
    return y.movedim(-1 - len(module.kernel_size), -1) if isinstance(module, _CONVOLUTIONS) else y


class AnotherCacheError(AttributeError):
    """A block asked its cache for more than to take keys and values: a state-space or convolution layer keeps something else there."""


class KvRecorder:
    """Takes the place of a KV cache, and stores only the ranges of keys and values, per head and channel."""

    def __init__(self) -> None:
        self.ranges: dict[str, Tensor] = {}  # key_low, key_high, value_low, value_high: (heads, channels)

    def __getattr__(self, name: str) -> Any:
        raise AnotherCacheError(name)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        for name, x in (("key", keys), ("value", values)):
            low, high = x.amin((0, 2)).cpu(), x.amax((0, 2)).cpu()
            self.ranges[f"{name}_low"] = torch.minimum(low, self.ranges.get(f"{name}_low", low))
            self.ranges[f"{name}_high"] = torch.maximum(high, self.ranges.get(f"{name}_high", high))
        return keys, values


@contextmanager
def counting_experts(block: nn.Module, prefix: str, counts: dict[str, Tensor]) -> Iterator[None]:
    """How many tokens were routed to each expert: modules with 3-dimensional weights are called with the routing as an argument."""
    handles = []
    for name, module in block.named_modules():
        all_experts = next((p for p in module.parameters(recurse=False) if p.dim() == 3), None)
        if all_experts is None:
            continue

        def see(_: nn.Module, inputs: tuple[Any, ...], name: str = f"{prefix}.{name}", experts: int = len(all_experts)) -> None:
            chosen = next((x for x in inputs if isinstance(x, Tensor) and not x.is_floating_point()), None)
            if chosen is not None:
                seen = torch.bincount(chosen.flatten(), minlength=experts)[:experts].cpu()
                counts[name] = counts.get(name, torch.zeros(experts, dtype=torch.int64)) + seen

        handles.append(module.register_forward_pre_hook(see))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def block_inputs(walk: Walk, index: int, hidden: Tensor) -> dict[str, InputStatistics]:
    """Of every weight of a block, by name: what it reads where the block reads these hidden states."""
    recorder = InputRecorder(watched(walk.blocks, walk.blocks.weights(index)), True, walk.sums())
    with walk.block(index) as block, recorder.attached():
        block.run(hidden, None, recorder.next_batch)
    return {reader: statistics for statistics, readers in finished(recorder).values() for reader in readers}


def finished(recorder: InputRecorder) -> dict[str, tuple[InputStatistics, list[str]]]:
    """The recorder is empty after that: nothing but the result holds its sums."""
    sites, recorder.sites = recorder.sites, {}
    return {name: (site.finished(), site.readers) for name, site in sites.items()}
