"""The unit of measuring that a worker computes: one weight in every format."""

from __future__ import annotations

import torch

from fewbits import formats, sensitivity
from fewbits.calibration import units
from fewbits.store.executors.unit import Unit
from fewbits.store.executors.worker import Made


def row(unit: Unit) -> Made:
    model, weight = units.weight_of(unit)
    torch.set_num_threads(1)  # as without workers, where several weights are measured side by side
    wanted = [formats.get(name) for name in unit.inputs["formats"]]
    return sensitivity.values_of(sensitivity.row_of(model, units.statistics_of(unit, model), weight, wanted, unit.inputs["method"])), {}
