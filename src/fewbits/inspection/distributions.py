"""The distribution of a tensor's values, by numpy alone: torch takes seconds to import, which is longer than to read a small model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_BINS = 12
_BARS = " ▁▂▃▄▅▆▇█"
_PIECE, _ROW = 1 << 16, 256  # numbers worked on at once, which stay in a cache; and those whose sums are in float32
_DRAWN = 1 << 16  # numbers, about, that the histogram is made of; extremes, mean and deviation are of all


@dataclass(frozen=True)
class Values:
    """The distribution of a tensor's values."""

    min: float
    max: float
    mean: float
    std: float
    peak: float  # largest magnitude in standard deviations: one scale for all values would have to reach it
    nonfinite: int
    histogram: tuple[float, ...]  # share of values in 12 bins within 4 standard deviations of the mean, outliers in the end bins

    @property
    def picture(self) -> str:
        top = max(self.histogram) or 1
        return "".join(_BARS[math.ceil((len(_BARS) - 1) * share / top)] for share in self.histogram)


def distribution(tensor: Any) -> Values:
    """Of a numpy array, or of a torch tensor."""
    import numpy as np

    x: Array = (tensor if isinstance(tensor, np.ndarray) else tensor.detach().float().numpy()).reshape(-1)
    count, lost = len(x), 0
    low, high = (float(x.min()), float(x.max())) if count else (math.nan, math.nan)
    if not (math.isfinite(low) and math.isfinite(high)):
        x = x[np.isfinite(x)]
        lost = count - len(x)
        if not len(x):
            return Values(math.nan, math.nan, math.nan, math.nan, math.nan, lost, (0.0,) * _BINS)
        low, high = float(x.min()), float(x.max())
    mean, std = _moments(x)
    drawn = x[:: max(1, len(x) // _DRAWN)].astype(np.float64)
    counts, _ = np.histogram(np.clip((drawn - mean) / (std or 1), -3.999, 3.999), _BINS, (-4, 4))
    shares = tuple(float(each) / len(drawn) for each in counts)
    return Values(low, high, mean, std, max(abs(low), abs(high)) / std if std else 0.0, lost, shares)


def _moments(x: Array) -> tuple[float, float]:
    """Mean and standard deviation: shifted by the first value, so that a constant has none."""
    import numpy as np

    shift, total, squares = x[0].astype(np.float32), 0.0, 0.0
    for start in range(0, len(x), _PIECE):
        piece = np.subtract(x[start : start + _PIECE], shift, dtype=np.float32)
        whole = piece[: len(piece) // _ROW * _ROW].reshape(-1, _ROW)
        rest = piece[whole.size :].astype(np.float64)
        total += float(whole.sum(1).sum(dtype=np.float64) + rest.sum())
        squares += float(np.einsum("ij,ij->i", whole, whole).sum(dtype=np.float64) + rest @ rest)
    away = total / len(x)
    return float(shift) + away, math.sqrt(max(0.0, squares / len(x) - away * away))
