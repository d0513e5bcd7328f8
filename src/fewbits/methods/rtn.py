"""Round to nearest: search the scales, round every weight to the level nearest to it. With statistics, columns that matter count more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fewbits import kernels
from fewbits.methods import Outcome
from fewbits.rounding import encode

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.calibration.statistics import Half, WeightStatistics
    from fewbits.formats import Format, How, Parts


def quantize(w: Tensor, fmt: Format, importance: Tensor | None = None, how: How = "search") -> Parts:
    from fewbits.kernels import quantizing

    if fmt.levels is None:
        return fmt.pack(w, {})
    if how == "search" and (parts := quantizing.quantize(fmt, w, importance)) is not None:
        return parts
    grid = fmt.fit(w, importance, how=how)
    return kernels.pack(fmt, encode(w, fmt.levels, *fmt.affine(grid)), grid)


class Rtn:
    needs_statistics = False

    def quantize(self, w: Tensor, fmt: Format, statistics: WeightStatistics | None = None, half: Half = None) -> Outcome:
        known = statistics is not None and statistics.has_importance
        return Outcome(quantize(w, fmt, statistics.importance(half) if statistics and known else None), "rtn")


METHOD = Rtn()
