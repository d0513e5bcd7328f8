"""Where the second-order forecast ends: measured KL of whole models against the predicted one, for one model. Loads no torch.

The forecast is an expansion around the float model, and its terms add up. At large damage the true KL departs from the sum. How far is
measured for the model itself, at a few strengths of damage: between them the logarithm of measured over predicted is a line over the
logarithm of the predicted KL. The sum grows with the measured KL, so a correction changes what a plan is said to cost and which plan
meets an accuracy, never which plan of a size is best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FROM = 0.02  # predicted KL from which on a plan is worth the measurement
_ALIKE = 0.1  # of the smallest measured strength: there the expansion is taken to be right
_STEPS = 60  # of a bisection


@dataclass(frozen=True)
class Curve:
    points: tuple[tuple[float, float], ...] = ()  # (predicted, measured), rising

    def measured(self, predicted: float) -> float:
        """What a predicted KL will be when it is measured."""
        if not self.points or predicted <= self._start:
            return predicted
        logs = [(math.log(self._start), 0.0), *((math.log(p), math.log(m / p)) for p, m in self.points)]
        at = math.log(predicted)
        right = next((i for i, (p, _) in enumerate(logs) if p >= at), len(logs) - 1)
        (p0, r0), (p1, r1) = logs[right - 1], logs[right]
        slope = max((r1 - r0) / (p1 - p0), -1.0)  # -1: the measured KL stays the same, and it never falls as damage grows
        return predicted * math.exp(r0 + slope * (at - p0) if at <= p1 else r1 + slope * (at - p1))

    def predicted(self, measured: float) -> float:
        """The opposite: the largest prediction that is measured as no more than this."""
        low, high = min(measured, self._start), max(measured, self._start)
        while self.measured(high) < measured and high < 1e6 * measured:
            high *= 2
        for _ in range(_STEPS):
            middle = math.sqrt(low * high) if low > 0 else high / 2
            low, high = (middle, high) if self.measured(middle) <= measured else (low, middle)
        return low if self.points else measured

    def ratio(self, predicted: float) -> float:
        return self.measured(predicted) / predicted if predicted > 0 else 1.0

    @property
    def _start(self) -> float:
        return self.points[0][0] * _ALIKE if self.points else math.inf


def through(points: Sequence[tuple[float, float]]) -> Curve:
    """Through these points, as far as they are positive."""
    return Curve(tuple(sorted((p, m) for p, m in points if p > 0 and m > 0 and math.isfinite(p) and math.isfinite(m))))
