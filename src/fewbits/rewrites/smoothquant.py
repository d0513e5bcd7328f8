"""SmoothQuant: outliers of activations are moved into the weights, until 8 bits are enough for both.

Factors are max|x|^alpha / max|w|^(1 - alpha) per channel; alpha is searched for each fold on the damage of W8A8, with real inputs and
the weights really rounded. The first token of a text can be a thousand times larger than all others, so it is judged apart: by the loss's
sensitivity at position 0, which for some weights is most of all and for others nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fewbits import kernels
from fewbits.methods import rtn
from fewbits.rewrites.candidates import Found, foldable

if TYPE_CHECKING:
    from fewbits.calibration.statistics import WeightStatistics
    from fewbits.formats import Format
    from fewbits.rewrites.folding import Fold

Activations = Literal["token", "tensor"]  # one scale per token, found as it runs; or one for all, from calibration

ALPHAS = tuple(step / 20 for step in range(6, 21))  # 0.3 to 1: static scales often want 0.9 and more
_FIRSTS = 16  # of one half: they are much alike
_LARGEST_CODE = 127


def search(
    fold: Fold,
    statistics: Mapping[str, WeightStatistics],
    weights: Mapping[str, Tensor],
    formats: Mapping[str, Format],
    activations: Activations = "token",
    alphas: tuple[float, ...] = ALPHAS,
) -> Found:
    """Alpha by the first half of the samples, judged on the second. `weights`: the consumers' (rows, cols)."""
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

    ones = torch.ones(len(fold.source))
    tried = [(damage(columns, 0), alpha, columns) for size in sizes for alpha in alphas for columns in [factors(alpha, size)]]
    _, alpha, columns = min(tried, key=lambda entry: entry[0])
    before, after = damage(ones, 1), damage(columns, 1)
    return Found(columns, alpha, before, after) if after < before else Found(ones, None, before, before)


def _damage(stats: WeightStatistics, w: Tensor, columns: Tensor, fmt: Format, static: Tensor | None, half: Literal[0, 1]) -> float:
    """In predicted KL where gradients are known: every token's error by its weight in the loss, position 0 by its own. Without them,
    relative to the token's output, as the norm that reads it next sees it."""
    seen = stats.input
    assert seen is not None
    scaled_w = w * columns
    rounded_w = kernels.decode(fmt, rtn.quantize(scaled_w, fmt, how="max"), (w.shape[0], w.shape[1]))
    total = 0.0
    for place, x in enumerate((seen.firsts(half)[:_FIRSTS], seen.drawn(half))):
        if len(x) == 0:
            continue
        y = x @ w.T
        square = (_rounded(x / columns, None if static is None else static / columns) @ rounded_w.T - y).square()
        if stats.sensitivity is None or stats.gradient_square is None:
            share = len(seen.firsts(half)) / max(1, seen.tokens(half))
            relative = square.sum(1) / y.square().sum(1).clamp(min=1e-30)
            total += float(relative.mean()) * (share if place == 0 else 1 - share)
        else:
            by_row = stats.output_sensitivity(half)
            by_row = by_row / by_row.mean().clamp(min=1e-30)
            weight = float(stats.sensitivity[half, place]) / max(1, seen.tokens(half))
            total += 0.5 * weight * float((square @ by_row).double().mean())
    return total


def _rounded(x: Tensor, largest: Tensor | None) -> Tensor:
    """To 8 bits: a scale for each token, or one for all from these sizes of the channels."""
    peak = x.abs().amax(1, keepdim=True) if largest is None else largest.max()
    step = (peak / _LARGEST_CODE).clamp(min=1e-30)
    return (x / step).round().clamp(-_LARGEST_CODE, _LARGEST_CODE) * step


def _positive(sizes: Tensor) -> Tensor:
    return sizes.clamp(min=max(float(sizes.max()) * 1e-5, 1e-30))
