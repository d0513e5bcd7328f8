"""Visiting vectors of columns: all columns under one code are rounded together, and their errors move the targets of those after them.

Which point is nearest is asked by the diagonal of the vector's metric, as codebooks weigh columns. What lies beside the diagonal counts
afterwards: each column gets its target given the errors of the others in the vector, the nearest point to these targets is asked for
again, and it is taken if it costs less by the whole metric.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits.devices import processor
from fewbits.formats.storage.codes import unit_values

if TYPE_CHECKING:
    from fewbits.formats.storage.codebooks import Points
    from fewbits.methods.error_feedback.columns import Columns

ATTEMPTS = 1  # at a cheaper point, given the errors of a vector's other columns


def visit(columns: Columns, targets: Tensor, coupling: Tensor, metric: Tensor, points: Points, *, keep: bool, isa: str | None) -> None:
    if isa is None:
        _visit_reference(columns, targets, coupling, metric, points, keep)
        return
    processor.native().visit_vectors(
        isa,
        points.native,
        *(array.numpy() for array in (targets, columns.weights, columns.errors, columns.codes, columns.scale)),
        None if columns.offset is None else columns.offset.numpy(),
        coupling.contiguous().numpy(),
        metric.contiguous().numpy(),
        keep,
        ATTEMPTS,
        torch.get_num_threads(),
    )


def _visit_reference(columns: Columns, targets: Tensor, coupling: Tensor, metric: Tensor, points: Points, keep: bool) -> None:
    d = points.dimension
    for vector in range(len(columns.codes)):
        inside = slice(vector * d, (vector + 1) * d)
        scale, offset = columns.scale[inside], None if columns.offset is None else columns.offset[inside]
        choice = _Choice(points, unit_values(targets[inside], scale, offset).T, metric[inside])
        codes = choice.nearest(choice.unit)
        if keep:
            codes = choice.cheaper(codes, columns.codes[vector])
        for _ in range(ATTEMPTS):
            codes = choice.cheaper(choice.nearest(choice.given_others(codes)), codes)
        columns.codes[vector] = codes
        decoded = choice.values(codes).T * scale
        error = columns.weights[inside] - (decoded if offset is None else decoded + offset)
        change = error - columns.errors[inside]
        columns.errors[inside] = error
        for i in range(d):  # rounded after the product and after the sum, not fused: as in the native loop
            targets[inside.stop :] += coupling[inside.stop :, inside.start + i].unsqueeze(1) * change[i]


class _Choice:
    """Codes for one vector of columns in many rows: unit (rows, dimension), metric (dimension, dimension)."""

    def __init__(self, points: Points, unit: Tensor, metric: Tensor) -> None:
        self.points, self.unit, self.metric = points, unit, metric

    def nearest(self, unit: Tensor) -> Tensor:  # -> (rows,)
        return self.points.nearest(unit, self.metric.diagonal()).squeeze(1)

    def values(self, codes: Tensor) -> Tensor:  # (rows,) -> (rows, dimension)
        return self.points.values(codes.unsqueeze(1))

    def cheaper(self, codes: Tensor, present: Tensor) -> Tensor:
        return torch.where(self._cost(codes) < self._cost(present), codes, present)

    def given_others(self, codes: Tensor) -> Tensor:
        away = self.unit - self.values(codes)
        moved = []
        for j, row in enumerate(self.metric):
            pull = torch.zeros_like(away[:, 0])
            for i in range(len(row)):
                if i != j:
                    pull = pull + row[i] / row[j] * away[:, i]
            moved.append(self.unit[:, j] + pull)
        return torch.stack(moved, 1)

    def _cost(self, codes: Tensor) -> Tensor:
        away = self.unit - self.values(codes)
        total: Tensor | None = None
        for j, row in enumerate(self.metric):
            along = row[0] * away[:, 0]
            for i in range(1, len(row)):
                along = along + row[i] * away[:, i]
            total = away[:, j] * along if total is None else total + away[:, j] * along
        assert total is not None
        return total
