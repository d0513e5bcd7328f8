"""`fewbits compare --stats`: the clipped share, error and divergence of every range estimator, on every input of the model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from fewbits.calibration import ranges
from fewbits.calibration.folder import Statistics
from fewbits.errors import InputError
from fewbits.progress import Progress, silent


@dataclass(frozen=True)
class RangeRow:
    input: str  # the first weight that reads it
    readers: int
    method: str
    low: float
    high: float
    clipped: float  # share of the values
    error: float  # mean squared error, relative to the mean square
    kl: float  # of the rounded values' distribution from the values'


@dataclass(frozen=True)
class RangeComparison:
    levels: str
    rows: tuple[RangeRow, ...]

    def by_input(self) -> dict[str, list[RangeRow]]:
        grouped: dict[str, list[RangeRow]] = {}
        for row in self.rows:
            grouped.setdefault(row.input, []).append(row)
        return grouped

    def best(self) -> dict[str, str]:
        """By input: the method of least error."""
        return {name: min(rows, key=lambda row: row.error).method for name, rows in self.by_input().items()}

    def to_dict(self) -> dict[str, object]:
        return {"levels": self.levels, "rows": [asdict(row) for row in self.rows], "best": self.best()}


def compare_ranges(stats: str | Path, levels: str = "int8", progress: Progress[str] = silent) -> RangeComparison:
    statistics = Statistics(Path(stats))
    if levels not in ranges.LEVELS:
        raise InputError(f"no activation levels are named `{levels}`", f"known ones: {', '.join(ranges.LEVELS)}")
    of = ranges.LEVELS[levels]
    readers: dict[str, int] = {}
    for name in statistics.names:
        if (site := statistics.site(name)) is not None:
            readers[site] = readers.get(site, 0) + 1
    rows = []
    for site in progress(readers, len(readers), "estimating ranges"):
        seen = statistics.input(site)
        if not seen.tokens():
            continue  # an expert that no token was given to
        if seen.histogram is None:
            raise InputError(f"`{stats}` has no histogram of `{site}`", "calibrate again")
        for method in ranges.all():
            span = seen.range(method, of)
            cost = ranges.evaluate(span, seen.histogram, of)
            rows.append(RangeRow(site, readers[site], method, span.low, span.high, cost.clipped, cost.error, cost.kl))
    return RangeComparison(levels, tuple(rows))
