"""What the searches for factors share: a fold with its weights at hand, and factors that can be folded and stay sane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fewbits.rewrites.folding import Fold

_LARGEST = 256.0  # of a factor, and 1 / 256 the smallest: float16 scales and float32 norms hold products of two such with room to spare


@dataclass(frozen=True, eq=False)
class Found:
    """The best factors of one fold. Errors are on samples that they were not fitted to."""

    columns: Tensor  # (cols,) what the consumers' columns are multiplied by; ones where nothing was better
    parameter: float | None  # the exponent that gave them; None: left as it is
    before: float
    after: float


def foldable(fold: Fold, wanted: Tensor) -> Tensor:  # (cols,) -> (cols,)
    """Of geometric mean 1, within bounds, and one factor (the geometric mean) for all columns that come from one channel."""
    logs = wanted.double().log()
    logs = logs.nan_to_num(0.0, 0.0, 0.0)  # a channel that is never anything but zero stays as it is
    sums = torch.zeros(fold.channels, dtype=torch.float64).index_add(0, fold.source, logs - logs.mean())
    counts = torch.zeros(fold.channels, dtype=torch.float64).index_add(0, fold.source, torch.ones_like(logs))
    return (sums / counts.clamp(min=1))[fold.source].exp().clamp(1 / _LARGEST, _LARGEST).float()
