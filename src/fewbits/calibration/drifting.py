"""How many samples are enough: what half of them say about each weight, against what all of them say.

Statistics that still move between half of the data and all of it would move on with more; those that do not have settled. Errors
of sampling fall with the square root of the samples, so four times the data halve what is shown here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fewbits.calibration.statistics import WeightStatistics
    from fewbits.calibration.storing import Statistics


@dataclass(frozen=True)
class Drift:
    weight: str
    importance: float  # mean |change| of a column's importance, relative to the mean importance
    hessian: float | None  # the same for the second moments: change relative to them, in the Frobenius norm


def drift(statistics: Statistics, names: Iterable[str] | None = None) -> tuple[Drift, ...]:
    """Largest first."""
    rows = [_drift(name, found) for name in names or statistics.names if (found := statistics.of(name)).input is not None]
    return tuple(sorted(rows, key=lambda row: row.importance, reverse=True))


def _drift(name: str, found: WeightStatistics) -> Drift:
    change = (found.importance(0) - found.importance()).abs().mean()
    hessian = None
    if found.has_hessian:
        everything = found.hessian()
        hessian = float((found.hessian(0) - everything).norm() / everything.norm().clamp(min=1e-30))
    return Drift(name, float(change), hessian)
