"""Round to nearest: search the scales, round every weight to the level nearest to it. With statistics, columns that matter count more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fewbits import kernels
from fewbits.methods import Outcome

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.calibration.statistics import WeightStatistics
    from fewbits.formats import Format, How, Parts


def quantize(w: Tensor, fmt: Format, importance: Tensor | None = None, how: How = "search") -> Parts:
    from fewbits.kernels.quantize import quantize as quantize_natively

    if fmt.is_cast:
        return fmt.pack(w, {})
    if how == "search" and (parts := quantize_natively(fmt, w, importance)) is not None:
        return parts
    grid = fmt.fit(w, importance, how=how)
    return kernels.pack(fmt, fmt.encode(w, grid, importance), grid)


class Rtn:
    needs_statistics = False

    def quantize(self, w: Tensor, fmt: Format, statistics: WeightStatistics | None = None) -> Outcome:
        return Outcome(quantize(w, fmt, statistics.importance() if statistics and statistics.has_importance else None), "rtn")


METHOD = Rtn()
