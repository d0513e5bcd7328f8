"""The unit of work that a worker does when a model is quantized: one weight."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.artifact import outcomes
from fewbits.calibration import units
from fewbits.calibration.importance_matrix import ImportanceMatrix
from fewbits.rewrites import Rewrite
from fewbits.rewrites.rescaling import RewrittenModel
from fewbits.rewrites.statistics import Rescaled
from fewbits.store.executors.unit import Unit
from fewbits.store.executors.worker import Made, placed

if TYPE_CHECKING:
    from fewbits.artifact.outcomes import StatisticsSource
    from fewbits.model import Model


def weight(unit: Unit) -> Made:
    model, weight = units.weight_of(unit)
    statistics: StatisticsSource | None = None
    if "imatrix" in unit.inputs:
        statistics = _importance(placed(unit, "imatrix"), model)
    elif "statistics" in unit.inputs:
        statistics = units.statistics_of(unit, model)
    if "factors" in unit.inputs:
        rewrite = _rewrite(placed(unit, "factors"))
        model, statistics = RewrittenModel(model, rewrite), Rescaled(units.statistics_of(unit, model), rewrite)
    return outcomes.packed(outcomes.quantized(model, weight, unit.parameters["format"], unit.parameters["method"], statistics))


@lru_cache(maxsize=1)
def _rewrite(path: Path) -> Rewrite:
    from safetensors.torch import load_file

    return Rewrite.from_tensors(load_file(path))


@lru_cache(maxsize=1)
def _importance(path: Path, model: Model) -> StatisticsSource:
    return ImportanceMatrix(path, model)
