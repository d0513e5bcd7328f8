"""SmoothQuant: outliers of activations are moved into the weights, until 8 bits are enough for both.

Factors are max|x|^alpha / max|w|^(1 - alpha) per channel; alpha is searched for each fold on the damage of W8A8, with real inputs and
the weights really rounded. From there `descent` finds each channel its own factor, where that holds on samples it has not seen. The first
token of a text can be a thousand times larger than all others, so it is judged apart: by the loss's sensitivity at position 0, which for
some weights is most of all and for others nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fewbits import kernels
from fewbits.methods import rtn
from fewbits.rewrites.candidates import Found, foldable
from fewbits.rewrites.descent import Reader, descend

if TYPE_CHECKING:
    from fewbits.calibration.statistics import Half, WeightStatistics
    from fewbits.formats import Format
    from fewbits.rewrites.folding import Fold

Activations = Literal["token", "tensor"]  # one scale per token, found as it runs; or one for all, from calibration

ALPHAS = tuple(step / 20 for step in range(6, 21))  # 0.3 to 1: static scales often want 0.9 and more
_FIRSTS = 16  # of one half: they are much alike
_DRAWN = 256  # of one half: more cost time and change little
_LARGEST_CODE = 127


def search(
    fold: Fold,
    statistics: Mapping[str, WeightStatistics],
    weights: Mapping[str, Tensor],
    formats: Mapping[str, Format],
    activations: Activations = "token",
    alphas: tuple[float, ...] = ALPHAS,
) -> Found:
    """Factors by the first half of the samples, judged on the second. `weights`: the consumers' (rows, cols)."""
    seen = statistics[fold.consumers[0]].input  # the consumers read one tensor
    assert seen is not None, "an embedding consumes no channels"
    largest_w = torch.stack([weights[name].abs().amax(0) for name in fold.consumers]).amax(0)
    # channels that only the first token drives may be left alone where every token has its own scale
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
    tried = [(damage(columns, 0), alpha, columns) for size in sizes for alpha in alphas for columns in [factors(alpha, size)]]
    _, alpha, columns = min(tried, key=lambda entry: entry[0])
    before, after, own = damage(ones, 1), damage(columns, 1), damage(refined(columns, 0), 1)
    if own < min(before, after):  # each channel's own factor: worth it, so fitted to all the samples
        return Found(refined(columns, None), alpha, before, own)
    return Found(columns, alpha, before, after) if after < before else Found(ones, None, before, before)


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
    """(rows,) of mean 1: which outputs matter to the loss; None: not known."""
    if stats.sensitivity is None or stats.gradient_square is None:
        return None
    by_row = stats.output_sensitivity(half)
    return by_row / by_row.mean().clamp(min=1e-30)


def _damage(stats: WeightStatistics, w: Tensor, columns: Tensor, fmt: Format, static: Tensor | None, half: Literal[0, 1]) -> float:
    """In predicted KL where gradients are known: every token's error by its weight in the loss, position 0 by its own. Without them,
    relative to the token's output, as the norm that reads it next sees it."""
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
    """Readers differ in how much the loss minds their errors; those of which it is not known count relative to their output."""
    by_row, costs = _row_weights(stats, half), []
    for x, weight in _tokens(stats, half):
        relative = 1 / max(float((x @ w.T).square().sum(1).mean()), 1e-30)
        costs.append(weight * (torch.full((len(w),), relative) if by_row is None else by_row))
    return Reader(w, torch.stack(costs))


def _rounded(x: Tensor, largest: Tensor | None) -> Tensor:
    """To 8 bits: a scale for each token, or one for all from these sizes of the channels."""
    peak = x.abs().amax(1, keepdim=True) if largest is None else largest.max()
    step = (peak / _LARGEST_CODE).clamp(min=1e-30)
    return (x / step).round().clamp(-_LARGEST_CODE, _LARGEST_CODE) * step


def _positive(sizes: Tensor) -> Tensor:
    return sizes.clamp(min=max(float(sizes.max()) * 1e-5, 1e-30))
