"""What flows through a module, recorded: inputs of its weights, gradients of their outputs, keys and values, experts chosen.

A module's weight is watched by a hook, an expert's by the products with its slice of a stack. An expert reads the tokens that were
chosen for it: which of them came first in their sample is asked for each call.
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

from fewbits.calibration.moments import Moments
from fewbits.calibration.statistics import InputStatistics
from fewbits.stacks import Product, Products

if TYPE_CHECKING:
    from fewbits.blocks import Blocks
    from fewbits.model import Weight

_KEPT_PER_SAMPLE, _STRIDE = 8, 59  # inputs kept as they are, at positions that differ from sample to sample
_FLOAT16_MAX = 65504.0
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
New = Callable[[Sequence[int]], Tensor]  # all zero, of this shape: `Room.new`, where the moments of a hundred experts exceed the memory


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
    _moment: Tensor | None = None  # there when first asked for: an expert that is never reached takes no memory until the end

    def __post_init__(self) -> None:
        self.halves = (Moments(self.cols), Moments(self.cols))

    @property
    def moment(self) -> Tensor | None:
        if self.hessian and self._moment is None:
            self._moment = self.new((2, self.cols, self.cols))
        return self._moment

    def add(self, x: Tensor, half: int) -> None:  # x (batch, length, cols)
        kept = x[:, :0]
        if x.shape[1] > 1:
            places = [(step * _STRIDE + len(self.first_half) + len(x)) % (x.shape[1] - 1) + 1 for step in range(_KEPT_PER_SAMPLE)]
            kept = x[:, places]
        self._add(x[:, 0].clone(), x[:, 1:].reshape(-1, self.cols), kept.reshape(-1, self.cols), half)

    def add_tokens(self, x: Tensor, is_first: Tensor, half: int, samples: int) -> None:  # x (tokens, cols), is_first (tokens,)
        """Some tokens of a batch of this many samples."""
        later = x[~is_first]
        step = max(1, len(later) // (_KEPT_PER_SAMPLE * samples))
        self._add(x[is_first], later, later[::step][: _KEPT_PER_SAMPLE * samples], half)

    def _add(self, first: Tensor, later: Tensor, kept: Tensor, half: int) -> None:
        if not len(first) + len(later):
            return
        self.first.append(first)
        self.first_half += [half] * len(first)
        each = [torch.stack(torch.aminmax(part)) for part in (first, later) if len(part)]
        low, high = torch.stack(each).unbind(1)
        self.extremes.append(torch.stack([low.min(), high.max()]))
        self.some.append(kept.clamp(-_FLOAT16_MAX, _FLOAT16_MAX).half())
        self.some_half += [half] * len(kept)
        self.halves[half].add(later)
        if self.moment is not None:
            self.moment[half].addmm_(later.T, later)

    def finished(self) -> InputStatistics:
        a, b = self.halves
        first = torch.cat([torch.empty(0, self.cols), *self.first])
        both = Moments(self.cols)
        both.add(first)  # ranges and histogram speak of every position
        both.merge(a)
        both.merge(b)
        return InputStatistics(
            count=torch.tensor([a.count, b.count]),
            total=torch.stack([a.sum, b.sum]),
            square=torch.stack([a.sum_squares, b.sum_squares]),
            low=both.low,
            high=both.high,
            first=first,
            first_half=torch.tensor(self.first_half, dtype=torch.uint8),
            extremes=torch.stack(self.extremes) if self.extremes else torch.empty(0, 2),
            some=torch.cat([torch.empty(0, self.cols, dtype=torch.float16), *self.some]),
            some_half=torch.tensor(self.some_half, dtype=torch.uint8),
            histogram=both.histogram,
            moment=self.moment,
        )


@dataclass(frozen=True)
class Watched:
    """Weights of a part of a model that is filled, and where to see what they read."""

    modules: dict[str, nn.Module]  # by weight: what multiplies with it
    experts: dict[str, Weight] = field(default_factory=dict)
    stacks: dict[str, Tensor] = field(default_factory=dict)  # by name: the parameters that the experts lie in


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
    """A convolution in groups multiplies each of them with other inputs: there are no second moments that all its rows share."""
    return not isinstance(module, _CONVOLUTIONS) or module.groups == 1


@dataclass(frozen=True)
class Call:
    """One batch through a block."""

    half: int
    samples: int
    length: int

    def is_first(self, product: Product) -> Tensor:
        """Of each token of an expert: does its sample begin with it? Tokens that cannot be told count as later ones."""
        if product.tokens is None:
            return torch.zeros(len(product.x), dtype=torch.bool)
        return product.tokens % self.length == 0


class _Recorder:
    """Hooks and watched products, for as long as `attached` lasts; `next_call` before each batch."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self.call = Call(0, 1, 1)
        self._products: Products | None = None

    @contextmanager
    def attached(self) -> Iterator[Self]:
        # the stacks' memory is asked for here: it changes whenever a block is filled
        self._products = Products(self._watched.stacks, self._see_product) if self._watched.stacks else None
        handles = [self._attach(name, module) for name, module in self._watched.modules.items()]
        try:
            with self._products or nullcontext():
                yield self
        finally:
            for handle in handles:
                handle.remove()

    def next_call(self, half: int, samples: int, length: int) -> None:
        self.call = Call(half, samples, length)
        if self._products:
            self._products.next_call(samples * length)

    def _attach(self, name: str, module: nn.Module) -> Any:
        raise NotImplementedError

    def _see_product(self, product: Product) -> None:
        raise NotImplementedError


class InputRecorder(_Recorder):
    """What every weight reads. Weights that are handed the same tensor share one site; each expert has its own."""

    def __init__(self, watched: Watched, hessians: bool, new: New = torch.zeros) -> None:
        super().__init__(watched)
        self._hessians, self._new = hessians, new
        self.sites = {name: Site([name], expert.shape[1], hessians, new) for name, expert in watched.experts.items()}
        self._held: list[tuple[Tensor, str]] = []  # tensors of this call: held, so that no other gets the same identity

    def next_call(self, half: int, samples: int, length: int) -> None:
        super().next_call(half, samples, length)
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
            self.sites[name].add(read, self.call.half)

        return module.register_forward_pre_hook(see)

    def _see_product(self, product: Product) -> None:
        site = self.sites[product.weight]
        site.add_tokens(product.x, self.call.is_first(product), self.call.half, self.call.samples)


@dataclass
class Gradients:
    """How one weight's output moves the loss, while it is being recorded. Fields as in WeightStatistics."""

    sensitivity: Tensor
    gradient_square: Tensor
    fisher_square: Tensor
    fisher: Tensor | None

    @staticmethod
    def of(weight: Weight, hessian: bool, new: New = torch.zeros) -> Gradients:
        rows, cols = weight.shape
        fisher = new((2, cols, cols)) if hessian else None
        return Gradients(_doubles(2), _doubles(rows), _doubles(cols), fisher)

    def add(self, x: Tensor, gradient: Tensor, half: int) -> None:  # (batch, length, cols) and (batch, length, rows)
        is_first = torch.zeros(x.shape[:2], dtype=torch.bool)
        is_first[:, 0] = True
        self.add_tokens(x.flatten(0, 1), gradient.flatten(0, 1), is_first.flatten(), half)

    def add_tokens(self, x: Tensor, gradient: Tensor, is_first: Tensor, half: int) -> None:  # (tokens, cols), (tokens, rows), (tokens,)
        norm = torch.linalg.vector_norm(gradient, dim=-1)
        root = norm / gradient.shape[-1] ** 0.5  # the square root of w_t, the mean over outputs of g^2
        weight = root.double().square()
        self.sensitivity[half] += torch.stack([weight[is_first].sum(), weight[~is_first].sum()])
        self.gradient_square[half] += torch.linalg.vector_norm(gradient, dim=0).double().square()
        scaled = x * root.unsqueeze(-1)
        self.fisher_square[half] += torch.linalg.vector_norm(scaled, dim=0).double().square()
        if self.fisher is not None:
            self.fisher[half].addmm_(scaled.T, scaled)


def _doubles(count: int) -> Tensor:
    return torch.zeros(2, count, dtype=torch.float64)


class GradientRecorder(_Recorder):
    """Every weight's output gradient beside its input."""

    def __init__(self, watched: Watched, weights: Sequence[Weight], hessians: bool, new: New = torch.zeros) -> None:
        super().__init__(watched)
        self.found = {w.name: Gradients.of(w, hessians, new) for w in weights if w.name in watched.modules or w.name in watched.experts}

    def _attach(self, name: str, module: nn.Module) -> Any:
        def see(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if not isinstance(output, Tensor):  # a router that hands out more than its product: which of them is it?
                self.found.pop(name, None)
                return
            x, half = inputs_of(module, inputs[0].detach()), self.call.half

            def on_gradient(gradient: Tensor) -> None:
                self.found[name].add(x, outputs_of(module, gradient).reshape(*x.shape[:2], -1), half)

            output.register_hook(on_gradient)

        return module.register_forward_hook(see)

    def _see_product(self, product: Product) -> None:
        is_first, half, into = self.call.is_first(product), self.call.half, self.found[product.weight]
        product.on_gradient(lambda gradient: into.add_tokens(product.x, gradient, is_first, half))


def inputs_of(module: nn.Module, x: Tensor) -> Tensor:
    """(batch, length, cols): what each output of the module is a product with; of a convolution, all that its kernel covers."""
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
    """(..., rows), places in the order of `inputs_of`."""
    return y.movedim(-1 - len(module.kernel_size), -1) if isinstance(module, _CONVOLUTIONS) else y


class KvRecorder:
    """A cache that keeps nothing but the ranges of keys and values, per head and channel."""

    def __init__(self) -> None:
        self.ranges: dict[str, Tensor] = {}  # key_low, key_high, value_low, value_high: (heads, channels)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        for name, x in (("key", keys), ("value", values)):
            low, high = x.amin((0, 2)), x.amax((0, 2))
            self.ranges[f"{name}_low"] = torch.minimum(low, self.ranges.get(f"{name}_low", low))
            self.ranges[f"{name}_high"] = torch.maximum(high, self.ranges.get(f"{name}_high", high))
        return keys, values


@contextmanager
def counting_experts(block: nn.Module, prefix: str, counts: dict[str, Tensor]) -> Iterator[None]:
    """How many tokens each expert was given: modules with stacked (3-dimensional) weights are called with the choices."""
    handles = []
    for name, module in block.named_modules():
        stacked = next((p for p in module.parameters(recurse=False) if p.dim() == 3), None)
        if stacked is None:
            continue

        def see(_: nn.Module, inputs: tuple[Any, ...], name: str = f"{prefix}.{name}", experts: int = len(stacked)) -> None:
            chosen = next((x for x in inputs if isinstance(x, Tensor) and not x.is_floating_point()), None)
            if chosen is not None:
                seen = torch.bincount(chosen.flatten(), minlength=experts)[:experts]
                counts[name] = counts.get(name, torch.zeros(experts, dtype=torch.int64)) + seen

        handles.append(module.register_forward_pre_hook(see))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def finished(recorder: InputRecorder) -> dict[str, tuple[InputStatistics, list[str]]]:
    return {name: (site.finished(), site.readers) for name, site in recorder.sites.items()}
