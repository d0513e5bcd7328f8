"""What the searches for factors share: their result, and factors brought into a form that can be folded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fewbits.rewrites.folding import Fold

_LARGEST = 256.0  # factors are from 1 / 256 to 256: float16 scales and float32 norms easily hold the product of two


@dataclass(frozen=True, eq=False)
class FoldFactors:
    """The best factors of one fold. Errors are on samples that they were not fitted to."""

    columns: Tensor  # (cols,) the consumers' columns are multiplied by these; ones where nothing was better
    parameter: float | None  # the exponent that gave them; None: left as it is
    before: float
    after: float


def foldable(fold: Fold, wanted: Tensor) -> Tensor:  # (cols,) -> (cols,)
    """The wanted factors with geometric mean 1, within bounds, and for all columns that one channel feeds the geometric mean of theirs."""
    logs = wanted.double().log()
    logs = logs.nan_to_num(0.0, 0.0, 0.0)  # a channel that is always zero keeps factor 1
    sums = torch.zeros(fold.channels, dtype=torch.float64).index_add(0, fold.source, logs - logs.mean())
    counts = torch.zeros(fold.channels, dtype=torch.float64).index_add(0, fold.source, torch.ones_like(logs))
    return (sums / counts.clamp(min=1))[fold.source].exp().clamp(1 / _LARGEST, _LARGEST).float()
