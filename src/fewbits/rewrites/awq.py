"""AWQ: columns with large inputs are made larger before rounding, so that their relative error shrinks.

Factors are (size of the channel's inputs)^a; a is searched on the error of the consumers' outputs with the rounding of the format in
use. The size is the root of the importance: proportional to mean |x| where all channels have the same distribution, and aware of the
attention sink where calibration took gradients. Clipping needs no separate search: the search for the format's scales includes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fewbits import kernels
from fewbits.methods import rtn
from fewbits.rewrites.candidates import FoldFactors, foldable
from fewbits.rewrites.rescaling import Rewrite

if TYPE_CHECKING:
    from fewbits.calibration.statistics import WeightStatistics
    from fewbits.formats import Format
    from fewbits.model.weights import Weight
    from fewbits.rewrites.folding import Fold

_STEPS = 20  # from exponent 0 to 1: every second one is tried, then the neighbours of the best
_ROWS = 128  # of each weight that the search looks at; its result is judged on all rows


@dataclass(frozen=True, eq=False)
class Rounded:
    """A weight of a fold, with everything that its rounding error depends on."""

    weight: Weight
    w: Tensor  # (rows, cols), as in the checkpoint
    fmt: Format
    stats: WeightStatistics

    def error(self, rewrite: Rewrite, half: Literal[0, 1], every: int = 1) -> float:
        """Of the output, on the samples of one half: sum over rows of g^2 dW H dW^T, in the scale of the original weight.

        Scales are always fitted to half 0. `every`: only every so many rows.
        """
        rows, columns = rewrite.rows.get(self.weight.name), rewrite.columns.get(self.weight.name)
        scaled, importance = self.w[::every], self._importance
        if rows is not None:
            scaled = scaled * rows[::every, None]
        if columns is not None:
            scaled, importance = scaled * columns, importance / columns.square()
        scaled = scaled.contiguous()
        parts = rtn.quantize(scaled, self.fmt, importance)
        error = kernels.decode(self.fmt, parts, (scaled.shape[0], scaled.shape[1])) - scaled
        if columns is not None:
            error = error / columns
        by_row = error.square() @ self._cost[half] if self._cost[half].dim() == 1 else ((error @ self._cost[half]) * error).sum(1)
        if rows is not None:
            by_row = by_row / rows[::every].square()
        if self.stats.gradient_square is not None:
            by_row = by_row * self.stats.output_sensitivity(half)[::every]
        return float(by_row.double().sum()) * every

    @cached_property
    def _importance(self) -> Tensor:
        return self.stats.importance(0)

    @cached_property
    def _cost(self) -> tuple[Tensor, Tensor]:
        """Of each half: the Hessian, or its diagonal where calibration kept no moments."""
        if self.stats.input is None or self.stats.input.moment is None:
            return self._importance, self.stats.importance(1)
        return self.stats.hessian(0), self.stats.hessian(1)


def search(fold: Fold, consumers: Mapping[str, Rounded], producer: Rounded | None = None, so_far: Rewrite | None = None) -> FoldFactors:
    """Factors fitted to one half of the samples and taken only if they lower the error on the other.

    `producer`: where it is itself rounded. Its rows are rescaled too, which changes its error in formats with one scale for the whole
    weight or with scales that are powers of two. Its relative change counts as much as that of the consumers' error.
    `so_far`: the factors of other folds on the same weights.
    """
    before = so_far or Rewrite()
    size = torch.stack([_size(each.stats) for each in consumers.values()]).mean(0)

    def columns(step: int) -> Tensor:
        return foldable(fold, size ** (step / _STEPS))

    def errors(candidate: Rewrite, half: Literal[0, 1], rows: int) -> tuple[float, float]:
        consumed = sum(each.error(candidate, half, -(-len(each.w) // rows)) for each in consumers.values())
        return consumed, 0.0 if producer is None else producer.error(candidate, half, -(-len(producer.w) // rows))

    def score(step: int) -> float:
        return _compared(errors(before.then(Rewrite.of(fold, columns(step))), 0, _ROWS), plain)

    plain = errors(before, 0, _ROWS)
    scores = {step: score(step) for step in range(2, _STEPS + 1, 2)}
    best = min(scores, key=scores.__getitem__)
    scores |= {step: score(step) for step in (best - 1, best + 1) if step <= _STEPS}
    best = min(scores, key=scores.__getitem__)

    all_rows = max(len(each.w) for each in [*consumers.values(), *([producer] if producer else [])])
    held_out, chosen = errors(before, 1, all_rows), errors(before.then(Rewrite.of(fold, columns(best))), 1, all_rows)
    if scores[best] < 1 and _compared(chosen, held_out) < 1:
        return FoldFactors(columns(best), best / _STEPS, held_out[0], chosen[0])
    return FoldFactors(torch.ones(len(fold.source)), None, held_out[0], held_out[0])


def _size(stats: WeightStatistics) -> Tensor:
    size = stats.importance(0).sqrt()
    return size.clamp(min=float(size.max()) * 1e-4)  # channels that are almost always zero would get factors without bound


def _compared(errors: tuple[float, float], plain: tuple[float, float]) -> float:
    """Below 1: better than before. The mean of the consumers' and the producer's errors, each relative to its error before."""
    ratios = [error / base for error, base in zip(errors, plain, strict=True) if base > 0]
    return sum(ratios) / len(ratios) if ratios else 1.0
