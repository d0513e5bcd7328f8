"""SmoothQuant: outliers of activations are moved into the weights, so that 8 bits are enough for both.

Factors are max|x|^alpha / max|w|^(1 - alpha) per channel; alpha is searched for each fold on the damage of W8A8, with inputs from
calibration and rounded weights. From there `descent` refines the factor of each channel; its result is kept if it is better on held-out
samples. The first token of a text can be a thousand times larger than all others, so position 0 is judged apart, by the sensitivity of
the loss there, which for some weights exceeds that of all other positions and for others is nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fewbits import kernels
from fewbits.methods import rtn
from fewbits.rewrites.candidates import FoldFactors, foldable
from fewbits.rewrites.descent import Reader, descend

if TYPE_CHECKING:
    from fewbits.calibration.statistics import Half, WeightStatistics
    from fewbits.formats import Format
    from fewbits.rewrites.folding import Fold

Activations = Literal["token", "tensor"]  # one scale per token, computed at run time; or one for all, from calibration

_ALPHAS = tuple(step / 20 for step in range(6, 21))  # 0.3 to 1: static scales often want 0.9 and more
_FIRSTS = 16  # inputs at position 0 of one half: they are much alike
_DRAWN = 256  # later inputs of one half: more cost time and change little
_LARGEST_CODE = 127


def search(
    fold: Fold,
    statistics: Mapping[str, WeightStatistics],
    weights: Mapping[str, Tensor],
    formats: Mapping[str, Format],
    activations: Activations = "token",
) -> FoldFactors:
    """Factors by the first half of the samples, judged on the second. `weights`: the consumers' (rows, cols)."""
    seen = statistics[fold.consumers[0]].input  # the consumers read one tensor
    assert seen is not None, "an embedding consumes no channels"
    largest_w = torch.stack([weights[name].abs().amax(0) for name in fold.consumers]).amax(0)
    # where every token has its own scale, channels that are large only in the first token may keep their size
    sizes = (seen.absmax, seen.drawn(0).abs().amax(0)) if activations == "token" else (seen.absmax,)
    static = seen.absmax if activations == "tensor" else None

    def factors(alpha: float, size: Tensor) -> Tensor:
        return foldable(fold, _positive(size) ** alpha / _positive(largest_w) ** (1 - alpha))

    def damage(columns: Tensor, half: Literal[0, 1]) -> float:
        return sum(_damage(statistics[name], weights[name], columns, formats[name], static, half) for name in fold.consumers)

    def refined(start: Tensor, half: Half) -> Tensor:
        readers = [_reader(statistics[name], weights[name], half) for name in fold.consumers]
        groups = [x for x, _ in _tokens(statistics[fold.consumers[0]], half)]
        return foldable(fold, descend(fold, start, readers, groups, static))

    ones = torch.ones(len(fold.source))
    tried = [(damage(columns, 0), alpha, columns) for size in sizes for alpha in _ALPHAS for columns in [factors(alpha, size)]]
    _, alpha, columns = min(tried, key=lambda entry: entry[0])
    before, after, by_channel = damage(ones, 1), damage(columns, 1), damage(refined(columns, 0), 1)
    if by_channel < min(before, after):  # better on held-out samples, so fitted again to all of them
        return FoldFactors(refined(columns, None), alpha, before, by_channel)
    return FoldFactors(columns, alpha, before, after) if after < before else FoldFactors(ones, None, before, before)


def _tokens(stats: WeightStatistics, half: Half) -> list[tuple[Tensor, float]]:
    """Inputs at position 0 and after it, each with the weight of its mean squared error."""
    seen = stats.input
    assert seen is not None
    times = 2 if half is None else 1
    places = seen.firsts(half)[: times * _FIRSTS], seen.drawn(half)[: times * _DRAWN]
    if stats.sensitivity is None or stats.gradient_square is None:
        share = len(seen.firsts(half)) / max(1, seen.tokens(half))
        shares = (share, 1 - share)
    else:
        at = stats.sensitivity.sum(0) if half is None else stats.sensitivity[half]
        shares = tuple((at / max(1, seen.tokens(half))).tolist())
    return [(x, weight) for x, weight in zip(places, shares, strict=True) if len(x)]


def _row_weights(stats: WeightStatistics, half: Half) -> Tensor | None:
    """(rows,) of mean 1: how much each output matters to the loss; None: calibration took no gradients."""
    if stats.sensitivity is None or stats.gradient_square is None:
        return None
    by_row = stats.output_sensitivity(half)
    return by_row / by_row.mean().clamp(min=1e-30)


def _damage(stats: WeightStatistics, w: Tensor, columns: Tensor, fmt: Format, static: Tensor | None, half: Literal[0, 1]) -> float:
    """In predicted KL where gradients are known: the error of each token times its weight in the loss. Without them, relative to the
    token's output, because the next norm divides by that size."""
    scaled_w, by_row = w * columns, _row_weights(stats, half)
    rounded_w = kernels.decode(fmt, rtn.quantize(scaled_w, fmt, how="max"), (w.shape[0], w.shape[1]))
    total = 0.0
    for x, weight in _tokens(stats, half):
        y = x @ w.T
        square = (_rounded(x / columns, None if static is None else static / columns) @ rounded_w.T - y).square()
        if by_row is None:
            total += weight * float((square.sum(1) / y.square().sum(1).clamp(min=1e-30)).mean())
        else:
            total += 0.5 * weight * float((square @ by_row).double().mean())
    return total


def _reader(stats: WeightStatistics, w: Tensor, half: Half) -> Reader:
    """The cost of an error is its effect on the loss; where that is not known, errors count relative to the output."""
    by_row, costs = _row_weights(stats, half), []
    for x, weight in _tokens(stats, half):
        relative = 1 / max(float((x @ w.T).square().sum(1).mean()), 1e-30)
        costs.append(weight * (torch.full((len(w),), relative) if by_row is None else by_row))
    return Reader(w, torch.stack(costs))


def _rounded(x: Tensor, largest: Tensor | None) -> Tensor:
    """To 8 bits: a scale for each token, or one for all from the largest value of each channel."""
    peak = x.abs().amax(1, keepdim=True) if largest is None else largest.max()
    step = (peak / _LARGEST_CODE).clamp(min=1e-30)
    return (x / step).round().clamp(-_LARGEST_CODE, _LARGEST_CODE) * step


def _positive(sizes: Tensor) -> Tensor:
    return sizes.clamp(min=max(float(sizes.max()) * 1e-5, 1e-30))
