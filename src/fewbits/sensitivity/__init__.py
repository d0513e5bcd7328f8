"""How much each weight minds each format: a table of predicted KL, weight by weight, kept as it grows.

predicting.py     one weight: its real rounding errors, and what they are predicted to cost
sampling.py       the few rows that stand for all of a weight
table.py          the result: plain data, read without torch
streams.py        the float model and changed copies of it, run side by side
probing.py        a few weights measured directly, to correct the rest; simpler scores beside it
accumulation.py   how errors add up from block to block
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from fewbits.errors import InputError
from fewbits.progress import say, silent
from fewbits.sensitivity.table import Cell, Container, Factor, Scores, Sensitivity, cell_of, read, runtime_block

if TYPE_CHECKING:
    from fewbits.calibration.storing import Statistics
    from fewbits.executors.crew import Crew
    from fewbits.formats import Format
    from fewbits.kept import Kept
    from fewbits.model import Model, Weight
    from fewbits.progress import Progress

__all__ = ["Cell", "Container", "Factor", "Scores", "Sensitivity", "measure", "read"]

ACTIVATIONS = ("int8", "fp8")  # as `--activations` takes them; one scale per token
BLOCKS = (32, 64, 128, 256)  # columns that a runtime gives one scale when it rounds the inputs of a quantized matmul by itself


class Row(NamedTuple):
    """One weight: predicted KL by format, and of rounding its input."""

    cells: dict[str, Cell]
    activations: dict[str, float]


def measure(
    model: Model,
    statistics: Statistics,
    formats: Sequence[Format],
    method: str = "auto",
    *,
    kept: Kept | None = None,
    crew: Crew | None = None,
    progress: Progress[Any] = silent,
) -> Sensitivity:
    """Every weight in each of these formats that its shape allows, and in the format it has. `kept`: finished rows, for the next run
    to go on from. `crew`: who makes those that are not there."""
    if statistics.model_sha256 != model.fingerprint:
        raise InputError(f"`{statistics.folder}` holds statistics of another model", "calibrate this one first")
    runs, method = tuple(statistics.about["runs"]), method.lower()  # spelt as `methods.get` takes it
    rows: dict[str, Row] = {}
    if kept:
        versions = {fmt.name: fmt.version for fmt in formats}
        kept = kept.of(source=model.fingerprint, statistics=statistics.digest, method=method, formats=versions)
        rows = _found(model, kept)
    if rows:
        say(progress, f"going on: {len(rows)} of {len(model.weights)} weights were measured")
    if crew and kept:
        known, how = crew.knowledge(statistics, kept), {"formats": [fmt.name for fmt in formats], "method": method}
        wanted = [({"weight": weight.name}, known.of(weight.name) | how) for weight in model.weights if weight.name not in rows]
        crew.finish("row", wanted, kept, progress, "measuring")
        rows = _found(model, kept)
    missing = [weight for weight in model.weights if weight.name not in rows]
    for name, row in progress(_measured(model, statistics, missing, formats, method), len(missing), "measuring"):
        rows[name] = row
        if kept:
            kept.keep("row", values_of(row), {}, weight=name)
    return Sensitivity(
        model=model.path.name,
        model_sha256=model.fingerprint,
        runs=runs,
        method=method,
        weights=model.weights,
        rows={weight.name: rows[weight.name].cells for weight in model.weights},
        config=model.config.to_dict(),
        activations={weight.name: rows[weight.name].activations for weight in model.weights if rows[weight.name].activations},
    )


def _found(model: Model, kept: Kept) -> dict[str, Row]:
    found = {weight.name: kept.find("row", weight=weight.name) for weight in model.weights}
    return {name: _restored(result.values) for name, result in found.items() if result}


def _measured(
    model: Model, statistics: Statistics, weights: Sequence[Weight], formats: Sequence[Format], method: str
) -> Iterator[tuple[str, Row]]:
    """Several weights at a time, each on one thread: their matrices are too small to share one among threads. In order all the same."""
    import torch

    workers = torch.get_num_threads()

    def one(weight: Weight) -> tuple[str, Row]:
        torch.set_num_threads(1)
        return weight.name, row_of(model, statistics, weight, formats, method)

    try:
        with ThreadPoolExecutor(workers) as pool:
            waiting = [pool.submit(one, weight) for weight in weights[: 2 * workers]]
            for following in range(len(waiting), len(weights) + len(waiting)):
                yield waiting.pop(0).result()
                if following < len(weights):  # never more than a few at once: each holds its matrix and its Hessians
                    waiting.append(pool.submit(one, weights[following]))
    finally:
        torch.set_num_threads(workers)


def row_of(model: Model, statistics: Statistics, weight: Weight, wanted: Sequence[Format], method: str) -> Row:
    from fewbits import activations, formats
    from fewbits.sensitivity.predicting import Predictor, activation_kl, runtime_kl

    own, known = formats.get(weight.dtype), statistics.of(weight.name)
    possible = [fmt for fmt in dict.fromkeys((*wanted, own)) if fmt.fits(weight.shape) is None]
    if not known.predicts_kl:
        if known.has_importance:
            raise InputError(f"the statistics of `{weight.name}` hold no gradients", "calibrate with gradients and Hessians")
        # Calibration never saw it. An expert that no token chose does no harm, and shares the format of its siblings; of anything else
        # nothing is known, and it stays as it is.
        some = possible if weight.expert is not None else [own]
        return Row({fmt.name: Cell(0.0, 0.0, "rtn", Scores(0.0, 0.0, 0.0, 0.0)) for fmt in some}, {})
    w = model.load(weight)
    inputs = ((name, activations.parse(name)) for name in ACTIVATIONS)
    rounded = {name: activation_kl(w, known, activation) for name, activation in inputs if activation}
    rounded |= {runtime_block(block): runtime_kl(w, known, block) for block in BLOCKS if w.shape[1] % block == 0}
    return Row(dict(Predictor(w, known, method).cells(possible)), {name: kl for name, kl in rounded.items() if kl is not None})


def _restored(values: Mapping[str, Any]) -> Row:
    return Row({fmt: cell_of(cell) for fmt, cell in values["cells"].items()}, dict(values["activations"]))


def values_of(row: Row) -> dict[str, Any]:
    return {"cells": {fmt: asdict(cell) for fmt, cell in row.cells.items()}, "activations": row.activations}
