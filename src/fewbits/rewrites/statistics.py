"""Statistics of a rewritten model, without running it; and how statistics of each kind are identified and sent to workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.calibration.folder import Statistics
from fewbits.calibration.importance_matrix import ImportanceMatrix
from fewbits.calibration.units import SentStatistics
from fewbits.rewrites.rescaling import Rewrite, rewritten
from fewbits.store.cache import hash_of
from fewbits.store.files import sha256_of

if TYPE_CHECKING:
    from fewbits.calibration.statistics import WeightStatistics
    from fewbits.store.cache import Cache
    from fewbits.store.executors.crew import Crew


@dataclass(frozen=True)
class Rescaled:
    """Those of the original model, rescaled as they are read."""

    original: Statistics
    rewrite: Rewrite

    def of(self, weight: str) -> WeightStatistics:
        return rewritten(self.original.of(weight), weight, self.rewrite)


def digest(statistics: Rescaled | Statistics | ImportanceMatrix | None) -> str | None:
    """A hash for the cache: codes fitted to other statistics must not be reused."""
    if isinstance(statistics, Rescaled):
        factors = statistics.rewrite.to_tensors()
        return hash_of([statistics.original.digest, {name: factor.tolist() for name, factor in factors.items()}])
    if isinstance(statistics, ImportanceMatrix):
        return sha256_of(statistics.path)
    return statistics.digest if statistics else None


def sent(statistics: object, crew: Crew, cache: Cache) -> SentStatistics:
    """These statistics as files that workers can read."""
    if isinstance(statistics, ImportanceMatrix):
        return SentStatistics(crew, {"imatrix": crew.place(statistics.path)})
    if isinstance(statistics, Statistics):
        return SentStatistics(crew, {}, statistics)
    if not isinstance(statistics, Rescaled):
        return SentStatistics(crew, {})
    parameters = {"of": digest(statistics)}
    factors = cache.find("factors", **parameters) or cache.keep("factors", {}, statistics.rewrite.to_tensors(), **parameters)
    return SentStatistics(crew, {"factors": crew.place(factors.path)}, statistics.original)
