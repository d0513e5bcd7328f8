"""Where channels may be rescaled without changing the function: found by running a block, and checked by rescaling it.

No architecture is named here. A norm qualifies where linears read the very tensor that it returns; a linear where multiplying each of
its rows by a different factor multiplies every input channel of a later linear by exactly one of these factors, for all tokens. Anything
else that reads the channels (a router, a residual, a nonlinear function) shows in the check: with random factors in the producer and
their inverses in the consumers, the output of the block must not change.
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
    from fewbits.model.blocks import Blocks
    from fewbits.model.stubs import Call
    from fewbits.model.weights import Weight

_TOKENS = 32  # of random hidden states; a fold through q and k changes attention only from the second token on
_UNCHANGED = 1e-5  # of the output's size: rounding errors of float32 are a few 1e-7, a channel left out moves it far more
_UNDONE = 1e-3  # of the change by the producer's factors alone: the consumers must undo all but this share
_SAME_RATIO = 1e-4  # of a channel's size: how far the tokens of one channel may differ in their ratio
_LOW, _HIGH = 1.5, 6.0  # factors for tracing: not near 1, the factor of a channel that the producer does not reach


@dataclass(frozen=True, eq=False)
class Fold:
    producer: str  # module path of a norm or of a linear weight
    consumers: tuple[str, ...]  # weights that read the same channels
    source: Tensor  # (cols,) int64: the channel of the producer that feeds each input column of the consumers
    channels: int  # of the producer: where it is fused (GPT-2's q, k and v), only some of them feed the consumers
    offset: float = 0.0  # the producer's gain is offset + weight


@dataclass(frozen=True)
class Findings:
    folds: list[Fold] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)  # (producer, why not)


def trace(blocks: Blocks, index: int) -> Findings:
    """The folds inside one block, in the order in which their producers run, and the norms that do not qualify."""
    with torch.no_grad(), blocks.filled(index) as block:
        hidden, calls = _entered(blocks)
        return _findings(_Scene(block, blocks.prefix(index), blocks.weights(index), lambda: blocks.run(index, hidden, calls[index])))


def trace_outer(blocks: Blocks) -> Findings:
    """The same of the last norm and the output matrix, which are in no block."""
    if tied := [weight for weight in blocks.outer_weights if weight.tied_to]:
        return Findings(refused=[(str(tied[0].tied_to), f"tied to `{tied[0].name}`, which would be rescaled with it")])
    with torch.no_grad():
        hidden, _ = _entered(blocks)
        return _findings(_Scene(blocks.module, "", blocks.outer_weights, lambda: blocks.leave(hidden)))


def _entered(blocks: Blocks) -> tuple[Tensor, list[Call]]:
    """A state of random numbers, except for what blocks are given of the tokens, and the other arguments of each block."""
    state, calls = blocks.enter(torch.arange(_TOKENS).unsqueeze(0))
    written, given = state.tensor_split([blocks.layout.changing], dim=-1)
    return torch.cat([torch.randn(written.shape, generator=torch.Generator().manual_seed(0)), given], dim=-1), calls


class _Scene:
    """A part of a model that can be run, with its modules under their full names."""

    def __init__(self, part: nn.Module, prefix: str, weights: Iterable[Weight], run: Callable[[], Tensor]) -> None:
        lead = f"{prefix}." if prefix else ""
        self.run = run
        self.modules = {lead + name: module for name, module in part.named_modules() if name}
        self.parameters = {lead + name: parameter for name, parameter in part.named_parameters()}
        # a tied weight cannot be rescaled alone: left out, it is one of the other readers that the check notices
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
    findings = Findings()
    for name in seen.order:
        if name in scene.norms:
            readers = tuple(c for c in seen.order if c in scene.weights and _is_same(seen.inputs[c], seen.outputs[name]))
            width = scene.channels(name)
            if not readers or any(scene.weights[c].shape[1] != width for c in readers):
                continue
            plain = Fold(name, readers, torch.arange(width), width)
            fold = next((f for f in (plain, replace(plain, offset=1.0)) if _proved(scene, f)), None)
            if fold is None:
                findings.refused.append((name, "rescaling it and its readers changes the output: something else depends on its channels"))
            else:
                findings.folds.append(fold)
        else:
            findings.folds.extend(fold for fold in _linear_folds(scene, seen, name) if _proved(scene, fold))
    return findings


def _linear_folds(scene: _Scene, seen: _Seen, producer: str) -> Iterator[Fold]:
    """Candidates: later weights each of whose columns one row of this weight feeds, and which row that is."""
    later = seen.order[seen.order.index(producer) + 1 :]
    consumers = [name for name in later if name in scene.weights and not _is_same(seen.inputs[name], seen.inputs[producer])]
    rows = scene.channels(producer)
    factors = _distinct(rows)

    def sources(low: int, high: int) -> dict[str, Tensor]:
        """With factors on these rows alone, of each consumer whose columns take single factors: the row behind each column, -1: none."""
        some = torch.ones(rows)
        some[low:high] = factors[low:high]
        scaled = _watch(scene, {producer: some}).inputs
        behind = {name: _sources(seen.inputs[name], scaled[name], some) for name in consumers if name in scaled}
        return {name: source for name, source in behind.items() if source is not None and bool((source >= 0).any())}

    reached = sources(0, rows)
    if not reached:  # fused with other matrices (q, k and v in one): the rows at one end may still qualify
        for last in (True, False):
            ends = sources(rows - 1, rows) if last else sources(0, 1)
            for name in ends:
                good, bad = 1, rows  # a part of a clean set is clean too, so the largest can be found by bisection
                while bad - good > 1:
                    middle = (good + bad) // 2
                    clean = name in (sources(rows - middle, rows) if last else sources(0, middle))
                    good, bad = (middle, bad) if clean else (good, middle)
                reached.setdefault(name, (sources(rows - good, rows) if last else sources(0, good))[name])
    groups: list[tuple[Tensor, list[str]]] = []
    for name, source in reached.items():
        if bool((source < 0).any()):
            continue  # some columns come from elsewhere
        group = next((names for other, names in groups if torch.equal(other, source)), None)
        if group is None:
            groups.append((source, [name]))
        else:
            group.append(name)
    for source, names in groups:
        yield Fold(producer, tuple(names), source, rows)


def _sources(x: Tensor, scaled: Tensor, factors: Tensor) -> Tensor | None:  # x, scaled (tokens, cols) -> (cols,)
    """Which factor each column was multiplied by (-1: by none); None: some column was not multiplied by a single factor."""
    x, scaled = x.double().flatten(0, -2), scaled.double().flatten(0, -2)
    if x.shape != scaled.shape:
        return None
    size = x.abs().amax(0)
    if not bool((size > 0).all()):
        return None  # the source of a column that is always zero cannot be told
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
    """Factors that can be told from each other, shuffled so that no order of channels inside a block resembles theirs."""
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(1)).double()
    return (math.log(_LOW) + (shuffled + 0.5) * (math.log(_HIGH / _LOW) / count)).exp().float()


def _proved(scene: _Scene, fold: Fold) -> bool:
    """With random factors, by the same code that rescales a loaded model. The second condition is for a producer whose factors hardly move
    the output: there the first one proves nothing."""
    factors = torch.empty(fold.channels).uniform_(-1, 1, generator=torch.Generator().manual_seed(2)).exp2()
    both = Rewrite.of(fold, factors[fold.source])
    before = scene.run()
    with _rescaled(scene, replace(both, columns={})):
        moved = float((scene.run() - before).abs().max())
    with _rescaled(scene, both):
        left = float((scene.run() - before).abs().max())
    return left <= _UNCHANGED * float(before.abs().max()) and left <= _UNDONE * moved


@contextmanager
def _rescaled(scene: _Scene, rewrite: Rewrite) -> Iterator[None]:
    before: dict[str, Tensor] = {}
    for name, parameter in scene.parameters.items():
        module = name.rpartition(".")[0]
        if module not in rewrite.rows and module not in rewrite.columns:
            continue
        before[name] = parameter.data
        if (weight := scene.weights.get(module)) is not None and parameter.dim() == 2:
            stored = parameter.data.T if weight.transposed else parameter.data
            matrix = rewrite.matrix(weight, stored)
            parameter.data = matrix.T.contiguous() if weight.transposed else matrix
        else:
            parameter.data = rewrite.tensor(name, parameter.data)
    try:
        yield
    finally:
        for name, data in before.items():
            scene.parameters[name].data = data


@dataclass
class _Seen:
    """Of modules that ran exactly once. The tensors are kept alive, so that no two of them can have the same address."""

    order: list[str] = field(default_factory=list)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


def _watch(scene: _Scene, factors: Mapping[str, Tensor] | None = None) -> _Seen:
    """One run. `factors` multiply the outputs of modules, which equals multiplying the rows of a weight and its bias."""
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
    """The same memory, in any view: some models flatten batch and length first."""
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel() and a.shape[-1] == b.shape[-1]
