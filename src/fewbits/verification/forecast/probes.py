"""Weights measured directly: one weight is rounded, the others stay float, and the model's KL is measured. They correct the forecast.

The prediction is an expansion around the float model; what it leaves out is much the same for weights of one kind. So the weights that
matter most are measured in three formats each, and the geometric mean of measured over predicted corrects the predictions of their kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fewbits import formats, kernels, methods
from fewbits.sensitivity.table import Cell, Factor, Scores
from fewbits.verification.forecast.side_by_side import Stream, compare_streams

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.calibration.folder import Statistics
    from fewbits.model import Model
    from fewbits.model.weights import Weight
    from fewbits.progress import Progress
    from fewbits.sensitivity.table import Sensitivity

_FEWEST = 3  # of probes for a correlation: a line goes through any two


@dataclass(frozen=True)
class Probe:
    weight: str
    kind: str
    format: str
    predicted: float
    measured: float


def probe(
    model: Model,
    statistics: Statistics,
    table: Sensitivity,
    wanted: Sequence[tuple[str, str]],
    windows: Sequence[Sequence[int]],
    memory: int,
    progress: Progress[Any],
) -> list[Probe]:
    """The KL of each (weight, format) alone, quantized by the table's method."""
    by_name = {weight.name: weight for weight in model.weights}
    streams = {}
    for name, fmt in wanted:
        streams[f"{name} {fmt}"] = Stream({name: _quantizer(model, statistics, by_name[name], fmt, table)})
    measured = compare_streams(model, windows, streams, memory, progress).measured
    return [
        Probe(name, by_name[name].kind, fmt, table.rows[name][fmt].kl, max(0.0, float(np.mean(measured[f"{name} {fmt}"].kl))))
        for name, fmt in wanted
    ]


def _quantizer(model: Model, statistics: Statistics, weight: Weight, fmt: str, table: Sensitivity) -> Any:
    def made() -> Tensor:
        method = methods.get(table.rows[weight.name][fmt].method if not formats.get(fmt).is_cast else "rtn")
        parts = method.quantize(model.load(weight), formats.get(fmt), statistics.of(weight.name)).parts
        return kernels.decode(formats.get(fmt), parts, weight.shape)

    return made


def spread_out(table: Sensitivity, count: int, formats_each: int = 3) -> list[tuple[str, str]]:
    """Weights of every kind in turn, those that matter most first, each in its worst, its middle and its best rounded format."""
    by_kind: dict[str, list[str]] = {}
    for weight in sorted(table.weights, key=lambda w: -max(cell.kl for cell in table.rows[w.name].values())):
        by_kind.setdefault(weight.kind, []).append(weight.name)
    chosen: list[str] = []
    while len(chosen) < count and any(by_kind.values()):
        chosen += [names.pop(0) for names in by_kind.values() if names]
    wanted = []
    for name in chosen[:count]:
        ranked = sorted((cell.kl, fmt) for fmt, cell in table.rows[name].items() if cell.kl > 0 and cell.method != "cast")
        places = {round(i * (len(ranked) - 1) / max(1, formats_each - 1)) for i in range(formats_each)} if ranked else set()
        wanted += [(name, ranked[place][1]) for place in sorted(places)]
    return wanted


def factors(probes: Sequence[Probe]) -> dict[str, Factor]:
    by_kind = {}
    for kind in dict.fromkeys(p.kind for p in probes):
        logs = [math.log(p.measured / p.predicted) for p in probes if p.kind == kind and p.measured > 0 and p.predicted > 0]
        if logs:
            by_kind[kind] = Factor(math.exp(float(np.mean(logs))), float(np.std(logs)), len(logs))
    return by_kind


def log_correlation(probes: Sequence[Probe]) -> float:
    some = [(math.log(p.predicted), math.log(p.measured)) for p in probes if p.measured > 0 and p.predicted > 0]
    if len(some) < _FEWEST:
        return math.nan
    predicted, measured = np.array(some).T
    return float(np.corrcoef(predicted, measured)[0, 1])


@dataclass(frozen=True)
class Score:
    """How well one measure of damage ranks weights and formats, and what planning by it costs."""

    name: str
    rank_correlation: float  # Spearman's, with measured KL
    bits_wasted: float  # bits per weight that its plan takes beyond the plan by predicted KL, for the same predicted KL


def compare_scores(table: Sensitivity, probes: Sequence[Probe], target: str = "gguf") -> list[Score]:
    from fewbits import targets
    from fewbits.planning.allocation import allocator

    measured = [probe.measured for probe in probes]
    whole = allocator(table, targets.get(target))
    size = (whole.least_bytes + sum(choices[-1].nbytes for choices in whole.choices)) // 3
    rows = []
    for name in (*Scores.__dataclass_fields__, "kl"):
        scores = [_score(table.rows[probe.weight][probe.format], name) for probe in probes]
        by_score = allocator(_scored(table, name), targets.get(target)).within_bytes(size, "")
        kl = math.fsum(whole.kl(weight, formats.get(by_score[weight.name].format)) for weight in table.weights)
        wasted = 8 * (by_score.nbytes - whole.within_kl(kl * (1 + 1e-9), "").nbytes) / whole.elements
        rows.append(Score(name, _rank_correlation(scores, measured), wasted))
    return rows


def _rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) < _FEWEST:
        return math.nan
    ranks = [np.argsort(np.argsort(np.array(values))) for values in (a, b)]  # measured values have no ties
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _score(cell: Cell, name: str) -> float:
    value: float = cell.kl if name == "kl" else getattr(cell.scores, name)
    return value


def _scored(table: Sensitivity, name: str) -> Sensitivity:
    """The same table with another measure in place of predicted KL."""
    rows = {weight: {fmt: replace(cell, kl=_score(cell, name)) for fmt, cell in row.items()} for weight, row in table.rows.items()}
    return replace(table, rows=rows, factors={}, activations={} if name != "kl" else table.activations)
