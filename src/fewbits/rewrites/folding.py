"""Where channels may be rescaled without changing the function: found by running a block, and proved by rescaling it.

No architecture is named here. A norm qualifies where linears read the very tensor that it gives; a linear where multiplying its rows by
factors of their own multiplies every input channel of a later linear by exactly one of them, for all tokens. Whatever else reads the
channels (a router, a residual, a nonlinear function) shows in the proof: random factors in the producer, their inverses in the
consumers, and the output of the block must stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fewbits.rewrites.rescaling import Rewrite

if TYPE_CHECKING:
    from fewbits.blocks import Blocks, Call
    from fewbits.model import Weight

_TOKENS = 32  # of random hidden states; q and k of the wrong kind show from the second token on
_KEPT = 1e-5  # of the output's size: float32 rounds a block's sums to a few 1e-7, a channel left out moves far more
_UNDONE = 1e-3  # of the change that the producer's factors alone make: the consumers must undo all but this
_SAME_RATIO = 1e-4  # of a channel's size: how far the tokens of one channel may differ in their ratio
_LOW, _HIGH = 1.5, 6.0  # factors for tracing: away from 1, which is the factor of what is not reached


@dataclass(frozen=True, eq=False)
class Fold:
    producer: str  # module path of a norm or of a linear weight
    consumers: tuple[str, ...]  # weights that read the same channels
    source: Tensor  # (cols,) int64: the channel of the producer that feeds each input column of the consumers
    channels: int  # that the producer has: more than feed the consumers where it is fused (GPT-2's q, k and v)
    offset: float = 0.0  # the producer's gain is offset + weight


@dataclass(frozen=True)
class Findings:
    folds: list[Fold] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)  # (producer, why not)


def find(blocks: Blocks, index: int) -> list[Fold]:
    return trace(blocks, index).folds


def trace(blocks: Blocks, index: int) -> Findings:
    """The folds inside one block, in the order in which their producers run, and the norms that do not qualify."""
    with torch.no_grad(), blocks.filled(index) as block:
        hidden, calls = _entered(blocks)
        return _findings(_Scene(block, blocks.prefix(index), blocks.weights(index), lambda: blocks.run(block, hidden, calls[index])))


def trace_outer(blocks: Blocks) -> Findings:
    """The last norm and the output matrix, which are in no block."""
    if tied := [weight for weight in blocks.outer_weights if weight.tied_to]:
        return Findings(refused=[(str(tied[0].tied_to), f"tied to `{tied[0].name}`, which would be rescaled with it")])
    with torch.no_grad():
        hidden, _ = _entered(blocks)
        return _findings(_Scene(blocks.module, "", blocks.outer_weights, lambda: blocks.leave(hidden)))


def _entered(blocks: Blocks) -> tuple[Tensor, list[Call]]:
    """Random hidden states, and what the blocks are called with beside them."""
    hidden, calls = blocks.enter(torch.arange(_TOKENS).unsqueeze(0))
    return torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)), calls


class _Scene:
    """A part of a model that can be run, with its modules under their full names."""

    def __init__(self, part: nn.Module, prefix: str, weights: Iterable[Weight], run: Callable[[], Tensor]) -> None:
        lead = f"{prefix}." if prefix else ""
        self.run = run
        self.modules = {lead + name: module for name, module in part.named_modules() if name}
        self.parameters = {lead + name: parameter for name, parameter in part.named_parameters()}
        # one that is tied to another cannot be rescaled alone: it counts as a reader of another kind, which the proof notices
        plain = (w for w in weights if w.kind not in ("embedding", "convolution") and w.tied_to is None and w.expert is None)
        self.weights = {weight.name: weight for weight in plain}
        self.norms = [name for name in self.modules if name not in self.weights and self._gains(name)]

    def _gains(self, name: str) -> int:
        """The length of a module's one-dimensional weight; 0 if it has none."""
        weight = self.modules[name]._parameters.get("weight")
        return len(weight) if weight is not None and weight.dim() == 1 else 0

    def channels(self, producer: str) -> int:
        return self.weights[producer].shape[0] if producer in self.weights else self._gains(producer)


def _findings(scene: _Scene) -> Findings:
    seen = _watch(scene)
    found = Findings()
    for name in seen.order:
        if name in scene.norms:
            readers = tuple(c for c in seen.order if c in scene.weights and _is_same(seen.inputs[c], seen.outputs[name]))
            width = scene.channels(name)
            if not readers or any(scene.weights[c].shape[1] != width for c in readers):
                continue
            plain = Fold(name, readers, torch.arange(width), width)
            fold = next((f for f in (plain, replace(plain, offset=1.0)) if _proved(scene, f)), None)
            if fold is None:
                found.refused.append((name, "rescaling it and its readers changes the output: something else depends on its channels"))
            else:
                found.folds.append(fold)
        else:
            found.folds.extend(fold for fold in _linear_folds(scene, seen, name) if _proved(scene, fold))
    return found


def _linear_folds(scene: _Scene, seen: _Seen, producer: str) -> Iterator[Fold]:
    """Candidates: the later weights that this one's rows reach one to one, and from which row each column comes."""
    later = seen.order[seen.order.index(producer) + 1 :]
    consumers = [name for name in later if name in scene.weights and not _is_same(seen.inputs[name], seen.inputs[producer])]
    rows = scene.channels(producer)
    factors = _distinct(rows)

    def sources(low: int, high: int) -> dict[str, Tensor]:
        """Of each consumer that is reached cleanly by these rows alone: the row behind each column, -1 where none is."""
        some = torch.ones(rows)
        some[low:high] = factors[low:high]
        scaled = _watch(scene, {producer: some}).inputs
        found = {name: _sources(seen.inputs[name], scaled[name], some) for name in consumers if name in scaled}
        return {name: source for name, source in found.items() if source is not None and bool((source >= 0).any())}

    found = sources(0, rows)
    if not found:  # fused with other matrices (q, k and v in one): the rows at one end may still qualify
        for last in (True, False):
            ends = sources(rows - 1, rows) if last else sources(0, 1)
            for name in ends:
                good, bad = 1, rows  # rows of a clean set are clean themselves, so the longest run can be searched for
                while bad - good > 1:
                    middle = (good + bad) // 2
                    clean = name in (sources(rows - middle, rows) if last else sources(0, middle))
                    good, bad = (middle, bad) if clean else (good, middle)
                found.setdefault(name, (sources(rows - good, rows) if last else sources(0, good))[name])
    groups: list[tuple[Tensor, list[str]]] = []
    for name, source in found.items():
        if bool((source < 0).any()):
            continue  # reached in part only
        group = next((names for other, names in groups if torch.equal(other, source)), None)
        if group is None:
            groups.append((source, [name]))
        else:
            group.append(name)
    for source, names in groups:
        yield Fold(producer, tuple(names), source, rows)


def _sources(x: Tensor, scaled: Tensor, factors: Tensor) -> Tensor | None:  # x, scaled (tokens, cols) -> (cols,)
    """Which factor each column was multiplied by (-1: by none), or None if some column was by no single one of them."""
    x, scaled = x.double().flatten(0, -2), scaled.double().flatten(0, -2)
    if x.shape != scaled.shape:
        return None
    size = x.abs().amax(0)
    if not bool((size > 0).all()):
        return None  # a column that is always zero could come from anywhere
    ratio = (x * scaled).sum(0) / x.square().sum(0)
    if bool(((scaled - ratio * x).abs().amax(0) > _SAME_RATIO * size).any()) or bool((ratio <= 0).any()):
        return None
    values, order = factors.double().log().sort()
    wanted = ratio.log()
    place = torch.searchsorted(values, wanted).clamp(1, len(values) - 1)
    place -= (wanted - values[place - 1] < values[place] - wanted).long()
    step = math.log(_HIGH / _LOW) / len(factors)
    untouched = wanted.abs() < step / 4
    if not bool((untouched | ((values[place] - wanted).abs() < step / 4)).all()):
        return None
    return torch.where(untouched, -1, order[place])


def _distinct(count: int) -> Tensor:
    """Factors that can be told from each other, in no order that a block's own could be mistaken for."""
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(1)).double()
    return (math.log(_LOW) + (shuffled + 0.5) * (math.log(_HIGH / _LOW) / count)).exp().float()


def _proved(scene: _Scene, fold: Fold) -> bool:
    """Random factors, by the very code that rescales a loaded model. Nothing is taken for unchanged that the producer hardly moves."""
    factors = torch.empty(fold.channels).uniform_(-1, 1, generator=torch.Generator().manual_seed(2)).exp2()
    both = Rewrite.of(fold, factors[fold.source])
    before = scene.run()
    with _rescaled(scene, replace(both, columns={})):
        moved = float((scene.run() - before).abs().max())
    with _rescaled(scene, both):
        left = float((scene.run() - before).abs().max())
    return left <= _KEPT * float(before.abs().max()) and left <= _UNDONE * moved


@contextmanager
def _rescaled(scene: _Scene, rewrite: Rewrite) -> Iterator[None]:
    kept: dict[str, Tensor] = {}
    for name, parameter in scene.parameters.items():
        module = name.rpartition(".")[0]
        if module not in rewrite.rows and module not in rewrite.columns:
            continue
        kept[name] = parameter.data
        if (weight := scene.weights.get(module)) is not None and parameter.dim() == 2:
            stored = parameter.data.T if weight.transposed else parameter.data
            matrix = rewrite.matrix(weight, stored)
            parameter.data = matrix.T.contiguous() if weight.transposed else matrix
        else:
            parameter.data = rewrite.tensor(name, parameter.data)
    try:
        yield
    finally:
        for name, data in kept.items():
            scene.parameters[name].data = data


@dataclass
class _Seen:
    """Of the modules that ran exactly once. The tensors are held, so that no two of them can share an address."""

    order: list[str] = field(default_factory=list)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


def _watch(scene: _Scene, factors: Mapping[str, Tensor] | None = None) -> _Seen:
    """One run; `factors` multiply the outputs of modules, which is what they would do to weight rows and bias."""
    seen, ran = _Seen(), dict.fromkeys([*scene.weights, *scene.norms], 0)

    def hook(name: str) -> Callable[[nn.Module, Any, Any], Any]:
        def record(_: nn.Module, args: Any, output: Any) -> Any:
            ran[name] += 1
            seen.order.append(name)
            seen.inputs[name], seen.outputs[name] = args[0], output
            return output * factors[name] if factors and name in factors else None

        return record

    with ExitStack() as hooks:
        for name in ran:
            hooks.callback(scene.modules[name].register_forward_hook(hook(name)).remove)
        scene.run()
    once = [name for name in seen.order if ran[name] == 1]
    return _Seen(once, {n: seen.inputs[n] for n in once}, {n: seen.outputs[n] for n in once})


def _is_same(a: Tensor, b: Tensor) -> bool:
    """The same memory, however it is viewed: some models flatten batch and length first."""
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel() and a.shape[-1] == b.shape[-1]
