"""Whether there are enough samples: how far the statistics of each weight differ between half of them and all.

Statistics that differ would change further with more data; those that do not have settled. Sampling errors fall with the square root of
the number of samples, so four times the data halve the numbers here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fewbits.calibration.folder import Statistics
    from fewbits.calibration.statistics import WeightStatistics


@dataclass(frozen=True)
class Drift:
    weight: str
    importance: float  # mean |change| of a column's importance, relative to the mean importance
    hessian: float | None  # the same for the second moments: change relative to them, in the Frobenius norm


def drift(statistics: Statistics, names: Iterable[str] | None = None) -> tuple[Drift, ...]:
    """Largest first."""
    rows = [_drift(name, of_weight) for name in names or statistics.names if (of_weight := statistics.of(name)).input is not None]
    return tuple(sorted(rows, key=lambda row: row.importance, reverse=True))


def _drift(name: str, statistics: WeightStatistics) -> Drift:
    change = (statistics.importance(0) - statistics.importance()).abs().mean()
    hessian = None
    if statistics.has_hessian:
        whole = statistics.hessian()
        hessian = float((statistics.hessian(0) - whole).norm() / whole.norm().clamp(min=1e-30))
    return Drift(name, float(change), hessian)
