"""The predicted KL of every weight in every format. A model and its statistics come in; a `Sensitivity` table goes out.

prediction.py     one weight: its rounding errors in each format, and the KL that they are predicted to cost
rows.py           the few rows that stand for all of a weight
table.py          the result: plain data, read without torch
units.py          one weight measured by a worker
errors.py         the table of a model without gradients: errors weighted by importance, no prediction of KL
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from fewbits.errors import InputError
from fewbits.progress import say, silent
from fewbits.sensitivity.table import Cell, Container, Factor, Scores, Sensitivity, cell_of, read, runtime_block
from fewbits.store import threads

if TYPE_CHECKING:
    from fewbits.calibration.folder import Statistics
    from fewbits.formats import Format
    from fewbits.model import Model
    from fewbits.model.weights import Weight
    from fewbits.progress import Progress
    from fewbits.store.cache import Cache
    from fewbits.store.executors.crew import Crew

__all__ = ["Cell", "Container", "Factor", "Scores", "Sensitivity", "measure", "measured", "read"]

UNIT = "fewbits.sensitivity.units:row"  # the function that a worker calls
ACTIVATIONS = ("int8", "fp8")  # as in `--activations`; one scale per token
BLOCKS = (32, 64, 128, 256)  # columns under one scale, where a runtime rounds the inputs of a quantized matmul to 8 bits by itself


class WeightRow(NamedTuple):
    """One weight: predicted KL by format, and by activation of rounding its input."""

    cells: dict[str, Cell]
    activations: dict[str, float]


def measure(
    model: Model,
    statistics: Statistics,
    formats: Sequence[Format],
    method: str = "auto",
    *,
    cache: Cache | None = None,
    crew: Crew | None = None,
    progress: Progress[Any] = silent,
) -> Sensitivity:
    """Every weight in each of these formats that its shape allows, and in the format it has. `cache`: where finished rows are stored, so
    that an interrupted run is resumed. `crew`: workers that compute the missing rows."""
    if statistics.model_sha256 != model.fingerprint:
        raise InputError(f"`{statistics.folder}` holds statistics of another model", "calibrate this one first")
    runs, method = tuple(statistics.about["runs"]), method.lower()  # lower case, as `methods.get` reads it
    rows: dict[str, WeightRow] = {}
    if cache:
        versions = {fmt.name: fmt.version for fmt in formats}
        cache = cache.of(source=model.fingerprint, statistics=statistics.digest, method=method, formats=versions)
        rows = _cached(model, cache)
    if rows:
        say(progress, f"resuming: {len(rows)} of {len(model.weights)} weights were measured")
    if crew and cache:
        from fewbits.calibration.units import SentStatistics

        known, how = SentStatistics(crew, {}, statistics), {"formats": [fmt.name for fmt in formats], "method": method}
        wanted = [({"weight": weight.name}, known.of(weight.name) | how) for weight in model.weights if weight.name not in rows]
        crew.finish("row", UNIT, wanted, cache, progress, "measuring")
        rows = _cached(model, cache)
    missing = [weight for weight in model.weights if weight.name not in rows]
    for name, row in progress(measured(model, statistics, missing, formats, method), len(missing), "measuring"):
        rows[name] = row
        if cache:
            cache.keep("row", values_of(row), {}, weight=name)
    return Sensitivity(
        model=model.name,
        model_sha256=model.fingerprint,
        runs=runs,
        method=method,
        weights=model.weights,
        rows={weight.name: rows[weight.name].cells for weight in model.weights},
        config=model.config.to_dict(),
        activations={weight.name: rows[weight.name].activations for weight in model.weights if rows[weight.name].activations},
    )


def _cached(model: Model, cache: Cache) -> dict[str, WeightRow]:
    results = {weight.name: cache.find("row", weight=weight.name) for weight in model.weights}
    return {name: _restored(result.values) for name, result in results.items() if result}


def measured(
    model: Model, statistics: Statistics, weights: Sequence[Weight], formats: Sequence[Format], method: str
) -> Iterator[tuple[str, WeightRow]]:
    """Several weights at a time, each on one thread: one matrix is too small to split among threads. The results come in order."""
    return threads.side_by_side(lambda weight: (weight.name, row_of(model, statistics, weight, formats, method)), weights)


def row_of(model: Model, statistics: Statistics, weight: Weight, wanted: Sequence[Format], method: str) -> WeightRow:
    from fewbits import formats
    from fewbits.formats.runtime import activations
    from fewbits.sensitivity.prediction import Predictor, activation_kl, runtime_kl

    present, known = formats.get(weight.dtype), statistics.of(weight.name)
    possible = [fmt for fmt in dict.fromkeys((*wanted, present)) if fmt.fits(weight.shape) is None]
    if not known.predicts_kl:
        if known.has_importance:
            raise InputError(f"the statistics of `{weight.name}` hold no gradients", "calibrate with gradients and Hessians")
        # No token reached this weight in calibration. An expert that no token chose does no harm, and shares the format of the other
        # experts; any other weight keeps its format, or its values where a target has no such format: nothing is known about it.
        some = possible if weight.expert is not None else [present, formats.get("fp32")]
        return WeightRow({fmt.name: Cell(0.0, 0.0, "rtn", Scores(0.0, 0.0, 0.0, 0.0)) for fmt in some}, {})
    w = model.load(weight)
    inputs = ((name, activations.parse(name)) for name in ACTIVATIONS)
    rounded = {name: activation_kl(w, known, activation) for name, activation in inputs if activation}
    rounded |= {runtime_block(block): runtime_kl(w, known, block) for block in BLOCKS if w.shape[1] % block == 0}
    return WeightRow(dict(Predictor(w, known, method).cells(possible)), {name: kl for name, kl in rounded.items() if kl is not None})


def _restored(values: Mapping[str, Any]) -> WeightRow:
    return WeightRow({fmt: cell_of(cell) for fmt, cell in values["cells"].items()}, dict(values["activations"]))


def values_of(row: WeightRow) -> dict[str, Any]:
    return {"cells": {fmt: asdict(cell) for fmt, cell in row.cells.items()}, "activations": row.activations}
