"""Judging codes by the half of the statistics that they were not fitted to."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.calibration.statistics import WeightStatistics
    from fewbits.formats import Format, Grid


class HeldOut(NamedTuple):
    damage: float  # predicted KL where gradients are known, else relative output error
    places: tuple[float, float]  # relative squared error of the output at position 0, and at later positions


def some_rows(w: Tensor, weights: int) -> slice:
    """Every n-th row, with about this many weights in all."""
    return slice(None, None, max(1, w.numel() // weights))


def judge(
    w: Tensor, fmt: Format, codes: Tensor, grid: Grid, statistics: WeightStatistics, rows: slice, output: Tensor | None = None
) -> HeldOut:
    """w and codes are `rows` of the weight; they were fitted to half 0. `output`: see `WeightStatistics.row_damage`."""
    error = w - fmt.decode(codes, grid)
    return HeldOut(_damage(error, w, statistics, rows, output), statistics.errors_by_place(error, w, 1))


def damage(w: Tensor, fmt: Format, codes: Tensor, grid: Grid, statistics: WeightStatistics, rows: slice) -> float:
    """That of `judge` alone."""
    return _damage(w - fmt.decode(codes, grid), w, statistics, rows)


def _damage(error: Tensor, w: Tensor, statistics: WeightStatistics, rows: slice, output: Tensor | None = None) -> float:
    scale = rows.step or 1 if statistics.predicts_kl else 1  # KL adds up over rows
    return statistics.damage(error, w, 1, rows, output) * scale
