"""Judging codes on samples that they were not fitted to: the half of the statistics that was held out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fewbits.rounding import decode

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.calibration.statistics import Half, WeightStatistics
    from fewbits.formats import Format, Grid


def some_rows(w: Tensor, weights: int) -> slice:
    """Every n-th row, so that about `weights` are tried on."""
    return slice(None, None, max(1, w.numel() // weights))


def damage(w: Tensor, fmt: Format, codes: Tensor, grid: Grid, statistics: WeightStatistics, rows: slice, half: Half = 1) -> float:
    """What these codes cost on one half of the samples: predicted KL where gradients are known, else relative output error."""
    assert fmt.levels
    return statistics.damage(w - decode(codes, fmt.levels, *fmt.affine(grid)), w, half, rows)
