"""Which rows of a weight stand for all of it: drawn by how much damage each is expected to take, so that few are enough.

The estimate of a sum over all rows from n drawn with probabilities proportional to a guess is (sum of the guesses) / n times the sum of
true / guess over the drawn. The better the guess, the smaller its spread; it is never biased by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Drawn:
    rows: Tensor  # (distinct,) int64, rising
    weight: Tensor  # (distinct,) float64: the sum over all rows is estimated by the weighted sum over these
    times: Tensor  # (distinct,) int64: how often each was drawn

    def total(self, values: Tensor) -> float:
        return float((values.double() * self.weight).sum())

    def spread(self, values: Tensor) -> float:
        """Standard error of `total`, relative to it; 0 where all rows were taken."""
        draws = int(self.times.sum())
        if draws == 0 or torch.equal(self.weight, torch.ones_like(self.weight)):
            return 0.0
        each = values.double() * self.weight / self.times * draws  # what every draw says of the total
        mean = float((each * self.times).sum()) / draws
        variance = float(((each - mean).square() * self.times).sum()) / max(1, draws - 1)
        return math.sqrt(variance / draws) / abs(mean) if mean else 0.0


def draw(guess: Tensor, count: int) -> Drawn:
    """guess (rows,) >= 0. At equal steps along the cumulative sum: the same rows every time, and none between two draws is forgotten."""
    rows = len(guess)
    if count >= rows:
        return Drawn(torch.arange(rows), torch.ones(rows, dtype=torch.float64), torch.ones(rows, dtype=torch.int64))
    guess = guess.double()
    guess = guess + max(float(guess.mean()) * 1e-3, 1e-300)  # nothing is certain to take no damage at all
    along = guess.cumsum(0)
    at = (torch.arange(count, dtype=torch.float64) + 0.5) * (float(along[-1]) / count)
    found, times = torch.searchsorted(along, at).clamp(max=rows - 1).unique(return_counts=True)
    return Drawn(found, times.double() * (float(along[-1]) / count) / guess[found], times)
