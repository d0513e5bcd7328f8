"""Which rows of a weight stand for all of it: drawn by the damage that each is expected to take, so that few are enough.

With n rows drawn with probabilities proportional to a guess, a sum over all rows is estimated as (sum of the guesses) / n times the sum
of true / guess over the drawn rows. A better guess makes the spread smaller; a bad one causes no bias.
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
        each = values.double() * self.weight / self.times * draws  # the estimate of the total by each draw
        mean = float((each * self.times).sum()) / draws
        variance = float(((each - mean).square() * self.times).sum()) / max(1, draws - 1)
        return math.sqrt(variance / draws) / abs(mean) if mean else 0.0


def draw(guess: Tensor, count: int) -> Drawn:
    """guess (rows,) >= 0. Draws lie at equal steps along its cumulative sum: the same rows every time, spread over all of the weight."""
    rows = len(guess)
    if count >= rows:
        return Drawn(torch.arange(rows), torch.ones(rows, dtype=torch.float64), torch.ones(rows, dtype=torch.int64))
    guess = guess.double()
    guess = guess + max(float(guess.mean()) * 1e-3, 1e-300)  # no row may have probability zero
    along = guess.cumsum(0)
    at = (torch.arange(count, dtype=torch.float64) + 0.5) * (float(along[-1]) / count)
    chosen, times = torch.searchsorted(along, at).clamp(max=rows - 1).unique(return_counts=True)
    return Drawn(chosen, times.double() * (float(along[-1]) / count) / guess[chosen], times)
