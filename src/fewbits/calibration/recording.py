"""Hooks that record what flows through a module: inputs of its weights, gradients of their outputs, keys and values, experts chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fewbits.calibration.moments import Moments
from fewbits.calibration.statistics import InputStatistics

if TYPE_CHECKING:
    from fewbits.model import Weight

_KEPT_PER_SAMPLE, _STRIDE = 2, 197  # inputs kept as they are, at positions that differ from sample to sample
_FLOAT16_MAX = 65504.0


@dataclass
class Site:
    """What one input tensor looked like, while it is being recorded."""

    readers: list[str]
    cols: int
    hessian: bool
    halves: tuple[Moments, Moments] = field(init=False)
    first: list[Tensor] = field(default_factory=list)
    first_half: list[int] = field(default_factory=list)
    extremes: list[Tensor] = field(default_factory=list)
    some: list[Tensor] = field(default_factory=list)
    some_half: list[int] = field(default_factory=list)
    moment: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        self.halves = (Moments(self.cols), Moments(self.cols))
        self.moment = torch.zeros(2, self.cols, self.cols) if self.hessian else None

    def add(self, x: Tensor, half: int) -> None:  # x (batch, length, cols)
        self.first.append(x[:, 0].clone())
        self.first_half += [half] * len(x)
        self.extremes.append(torch.stack(torch.aminmax(x)))
        if x.shape[1] > 1:
            places = [(step * _STRIDE + len(self.first_half)) % (x.shape[1] - 1) + 1 for step in range(_KEPT_PER_SAMPLE)]
            self.some.append(x[:, places].clamp(-_FLOAT16_MAX, _FLOAT16_MAX).half().reshape(-1, self.cols))
            self.some_half += [half] * len(x) * len(places)
        later = x[:, 1:].reshape(-1, self.cols)
        self.halves[half].add(later)
        if self.moment is not None:
            self.moment[half].addmm_(later.T, later)

    def finished(self) -> InputStatistics:
        a, b = self.halves
        first = torch.cat(self.first)
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
            extremes=torch.stack(self.extremes),
            some=torch.cat(self.some) if self.some else torch.empty(0, self.cols, dtype=torch.float16),
            some_half=torch.tensor(self.some_half, dtype=torch.uint8),
            histogram=both.histogram,
            moment=self.moment,
        )


class InputRecorder:
    """Hooks that see what every weight of a module reads. Weights that are handed the same tensor share one site."""

    def __init__(self, modules: dict[str, nn.Module], hessians: bool) -> None:
        self._modules, self._hessians = modules, hessians
        self.sites: dict[str, Site] = {}
        self.half = 0
        self._held: list[tuple[Tensor, str]] = []  # tensors of this call: held, so that no other gets the same identity

    @contextmanager
    def attached(self) -> Iterator[InputRecorder]:
        handles = [module.register_forward_pre_hook(self._hook(name)) for name, module in self._modules.items()]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def next_call(self, half: int) -> None:
        self.half = half
        self._held.clear()

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def see(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            x: Tensor = inputs[0]
            shared = next((site for tensor, site in self._held if tensor is x), None)
            if shared is not None:
                if name not in self.sites[shared].readers:
                    self.sites[shared].readers.append(name)
                return
            self._held.append((x, name))
            if name not in self.sites:
                self.sites[name] = Site([name], x.shape[-1], self._hessians)
            self.sites[name].add(x.detach().reshape(x.shape[0], -1, x.shape[-1]), self.half)

        return see


@dataclass
class Gradients:
    """How one weight's output moves the loss, while it is being recorded. Fields as in WeightStatistics."""

    sensitivity: Tensor
    gradient_square: Tensor
    fisher_square: Tensor
    fisher: Tensor | None

    @staticmethod
    def of(weight: Weight, hessian: bool) -> Gradients:
        rows, cols = weight.shape
        fisher = torch.zeros(2, cols, cols) if hessian else None
        return Gradients(_doubles(2), _doubles(rows), _doubles(cols), fisher)

    def add(self, x: Tensor, gradient: Tensor, half: int) -> None:  # (batch, length, cols) and (batch, length, rows)
        norm = torch.linalg.vector_norm(gradient, dim=-1)
        root = norm / gradient.shape[-1] ** 0.5  # the square root of w_t, the mean over outputs of g^2
        weight = root.double().square()
        self.sensitivity[half] += torch.stack([weight[:, 0].sum(), weight[:, 1:].sum()])
        self.gradient_square[half] += torch.linalg.vector_norm(gradient.reshape(-1, gradient.shape[-1]), dim=0).double().square()
        scaled = (x * root.unsqueeze(-1)).reshape(-1, x.shape[-1])
        self.fisher_square[half] += torch.linalg.vector_norm(scaled, dim=0).double().square()
        if self.fisher is not None:
            self.fisher[half].addmm_(scaled.T, scaled)


def _doubles(count: int) -> Tensor:
    return torch.zeros(2, count, dtype=torch.float64)


class GradientRecorder:
    """Hooks that see every weight's output gradient beside its input."""

    def __init__(self, modules: dict[str, nn.Module], weights: Sequence[Weight], hessians: bool) -> None:
        self._modules = modules
        self.found = {w.name: Gradients.of(w, hessians) for w in weights}
        self.half = 0

    @contextmanager
    def attached(self) -> Iterator[GradientRecorder]:
        handles = [module.register_forward_hook(self._hook(self.found[name])) for name, module in self._modules.items()]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, into: Gradients) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def see(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            x = inputs[0].detach()
            x, half = x.reshape(x.shape[0], -1, x.shape[-1]), self.half

            def on_gradient(gradient: Tensor) -> None:
                into.add(x, gradient.reshape(*x.shape[:2], -1), half)

            output.register_hook(on_gradient)

        return see


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
