"""SmoothQuant: outliers of activations are moved into the weights, until 8 bits are enough for both.

Factors are max|x|^alpha / max|w|^(1 - alpha) per channel; alpha is searched for each fold on the output error of W8A8, with the inputs
and the weights really rounded. Every token's error counts relative to its own output, as the norm that reads it next sees it: the first
token of a text can be a thousand times larger than all others, and counts by its share of the loss's sensitivity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from fewbits import kernels
from fewbits.methods import rtn
from fewbits.rewrites.candidates import Found, foldable

if TYPE_CHECKING:
    from fewbits.calibration.statistics import InputStatistics, WeightStatistics
    from fewbits.formats import Format
    from fewbits.rewrites.folding import Fold

Activations = Literal["token", "tensor"]  # one scale per token, found as it runs; or one for all, from calibration

ALPHAS = tuple(step / 20 for step in range(6, 21))  # 0.3 to 1: static scales often want 0.9 and more
_FIRSTS = 16  # of one half: they are much alike
_LARGEST_CODE = 127


class _Tokens(NamedTuple):
    """Inputs of one half of the samples. Position 0 counts by its share of the loss's sensitivity, not by its share of the tokens."""

    later: Tensor  # (tokens, cols)
    first: Tensor
    share: float  # of the first


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
    halves = [_tokens(seen, [statistics[name] for name in fold.consumers], half) for half in (0, 1)]
    largest_w = torch.stack([weights[name].abs().amax(0) for name in fold.consumers]).amax(0)
    # channels that only the first token drives may be left alone where every token has its own scale
    sizes = (seen.absmax, halves[0].later.abs().amax(0)) if activations == "token" else (seen.absmax,)

    def factors(alpha: float, size: Tensor) -> Tensor:
        return foldable(fold, _positive(size) ** alpha / _positive(largest_w) ** (1 - alpha))

    def error(columns: Tensor, half: int) -> float:
        tokens, static = halves[half], seen.absmax if activations == "tensor" else None
        total = 0.0
        for name in fold.consumers:
            parts = ((tokens.later, 1 - tokens.share), (tokens.first, tokens.share))
            total += sum(share * w8a8_error(x, weights[name], columns, formats[name], static) for x, share in parts if share and len(x))
        return total / len(fold.consumers)

    ones = torch.ones(len(fold.source))
    tried = [(error(columns, 0), alpha, columns) for size in sizes for alpha in alphas for columns in [factors(alpha, size)]]
    _, alpha, columns = min(tried, key=lambda entry: entry[0])
    before, after = error(ones, 1), error(columns, 1)
    return Found(columns, alpha, before, after) if after < before else Found(ones, None, before, before)


def _tokens(seen: InputStatistics, readers: Sequence[WeightStatistics], half: Literal[0, 1]) -> _Tokens:
    first = seen.firsts(half)[:_FIRSTS]
    if all(reader.sensitivity is not None for reader in readers):
        share = sum(reader.first_share(half) for reader in readers) / len(readers)
    else:
        share = len(seen.firsts(half)) / max(1, seen.tokens(half))
    return _Tokens(seen.drawn(half), first, share)


def w8a8_error(x: Tensor, w: Tensor, columns: Tensor, fmt: Format, largest: Tensor | None = None) -> float:
    """Mean over tokens of |error|^2 / |y|^2 with w's columns multiplied and x divided by `columns`.

    `largest` (cols,): static scale from these sizes of x; None: every token has a scale of its own.
    """
    scaled_x, scaled_w = x / columns, w * columns
    peak = scaled_x.abs().amax(1, keepdim=True) if largest is None else (largest / columns).max()
    step = (peak / _LARGEST_CODE).clamp(min=1e-30)
    rounded_x = (scaled_x / step).round().clamp(-_LARGEST_CODE, _LARGEST_CODE) * step
    parts = rtn.quantize(scaled_w, fmt, how="max")
    rounded_w = kernels.decode(fmt, parts, (w.shape[0], w.shape[1]))
    y = x @ w.T
    error = rounded_x @ rounded_w.T - y
    size = y.square().sum(1)
    return float((error.square().sum(1)[size > 0] / size[size > 0]).double().mean())


def _positive(sizes: Tensor) -> Tensor:
    return sizes.clamp(min=max(float(sizes.max()) * 1e-5, 1e-30))
