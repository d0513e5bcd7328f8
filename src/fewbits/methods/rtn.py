"""Round to nearest: fit the scales, round every weight to the level nearest to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fewbits import kernels
from fewbits.rounding import encode

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Format, How, Parts


def quantize(w: Tensor, fmt: Format, importance: Tensor | None = None, how: How = "search") -> Parts:
    if fmt.levels is None:
        return fmt.pack(w, {})
    grid = fmt.fit(w, importance, how=how)
    return kernels.pack(fmt, encode(w, fmt.levels, *fmt.affine(grid)), grid)
