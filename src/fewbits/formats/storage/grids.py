"""The points of GGUF's codebook types, as the `gguf` package has them: no copy of a table to keep in step with llama.cpp."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")


@cache
def grid(name: str) -> Tensor:
    """(points, 4 or 8) float32, whole numbers: magnitudes, and in iq1 -1, 0 and 1."""
    import gguf
    import torch

    if name not in NAMES:
        raise KeyError(f"`{name}` has no grid; these have one: {', '.join(NAMES)}")
    kind = getattr(gguf.quants, name.upper())
    kind.init_grid()
    return torch.from_numpy(kind.grid.reshape(kind.grid_shape).copy())
