"""What one pass over the inputs of a linear layer leaves behind: per channel count, sums, extremes; and a histogram of all values."""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits import kernels
from fewbits.calibration.histogram import BINS, Histogram, exponent_above, refuse
from fewbits.errors import InputError

# Sums are taken in this order and no other, so that native code and torch give the same bits at any number of threads: four rows as
# (a + b) + (c + d), fours one after another into the partial sum of their chunk, chunks one after another. Rows that lack are zeros.
CHUNK = 256  # rows; native/statistics.cc holds the same number
_FOUR = 4


class Moments:
    """Running statistics of (tokens, cols) inputs."""

    def __init__(self, cols: int) -> None:
        self.cols = cols
        self.count = 0  # tokens
        self.sum = torch.zeros(cols, dtype=torch.float64)
        self.sum_squares = torch.zeros(cols, dtype=torch.float64)
        self.low = torch.full((cols,), torch.inf, dtype=torch.float32)
        self.high = torch.full((cols,), -torch.inf, dtype=torch.float32)
        self.histogram = Histogram()

    @property
    def mean(self) -> Tensor:  # (cols,) float64
        return self.sum / max(self.count, 1)

    @property
    def mean_square(self) -> Tensor:  # (cols,) float64
        return self.sum_squares / max(self.count, 1)

    @property
    def absmax(self) -> Tensor:  # (cols,) float32
        return torch.maximum(self.low.abs(), self.high.abs()) if self.count else torch.zeros(self.cols)

    def add(self, x: Tensor) -> None:  # x (tokens, cols)
        """Count these tokens. Nothing is counted if one of their values is not finite."""
        if x.ndim != 2 or x.shape[1] != self.cols:
            raise InputError(f"activations of {tuple(x.shape)} were given where (tokens, {self.cols}) are counted")
        x = x.detach().to(torch.float32).contiguous()
        if x.numel() == 0:
            self.count += len(x)
            return
        isa = _isa()
        self._take(len(x), *(_reference(x) if isa is None else _native(x, isa, self.histogram.exponent)))

    def merge(self, other: Moments) -> None:
        if other.cols != self.cols:
            raise InputError(f"statistics of {other.cols} channels cannot be merged with those of {self.cols}")
        self._take(other.count, other.sum, other.sum_squares, other.low, other.high, other.histogram)

    def to_tensors(self) -> dict[str, Tensor]:
        return {
            "count": torch.tensor([self.count]),
            "sum": self.sum.clone(),
            "sum_squares": self.sum_squares.clone(),
            "low": self.low.clone(),
            "high": self.high.clone(),
            **{f"histogram.{name}": tensor for name, tensor in self.histogram.to_tensors().items()},
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Moments:
        like = cls(tensors["sum"].numel()).to_tensors() if "sum" in tensors else {"sum": torch.empty(0)}
        for name, pattern in like.items():
            if name not in tensors or tensors[name].shape != pattern.shape or tensors[name].dtype != pattern.dtype:
                raise InputError(f"`{name}` is missing from the statistics, or is not what it should be", "take the statistics again")
        moments = cls(tensors["sum"].numel())
        moments.count = int(tensors["count"])
        moments.sum, moments.sum_squares = tensors["sum"].clone(), tensors["sum_squares"].clone()
        moments.low, moments.high = tensors["low"].clone(), tensors["high"].clone()
        moments.histogram = Histogram.from_tensors({name: tensors[f"histogram.{name}"] for name in ("counts", "reach")})
        return moments

    def _take(self, count: int, total: Tensor, squares: Tensor, low: Tensor, high: Tensor, histogram: Histogram) -> None:
        self.count += count
        self.sum = self.sum + total
        self.sum_squares = self.sum_squares + squares
        self.low = torch.minimum(self.low, low)
        self.high = torch.maximum(self.high, high)
        self.histogram.merge(histogram)


_Taken = tuple[Tensor, Tensor, Tensor, Tensor, Histogram]


def _reference(x: Tensor) -> _Taken:
    exponent_above(x)  # refuses what is not finite
    wide = x.double()
    low, high = torch.aminmax(x, dim=0)
    return _sum_of_rows(wide), _sum_of_rows(wide * wide), low + 0.0, high + 0.0, Histogram.of(x)  # + 0.0: no negative zeros


def _sum_of_rows(x: Tensor) -> Tensor:  # (rows, cols) -> (cols,), in the order that CHUNK's comment says
    rows, cols = x.shape
    chunks = -(-rows // CHUNK)
    padded = torch.cat([x, x.new_zeros(chunks * CHUNK - rows, cols)]).view(chunks, CHUNK // _FOUR, _FOUR, cols)
    fours = (padded[:, :, 0] + padded[:, :, 1]) + (padded[:, :, 2] + padded[:, :, 3])
    partial = x.new_zeros(chunks, cols)
    for step in range(CHUNK // _FOUR):
        partial += fours[:, step]
    total = x.new_zeros(cols)
    for chunk in partial:
        total += chunk
    return total


def _native(x: Tensor, isa: str, exponent: int) -> _Taken:
    cols = x.shape[1]
    total, squares = torch.empty(cols, dtype=torch.float64), torch.empty(cols, dtype=torch.float64)
    low, high, counts = torch.empty(cols), torch.empty(cols), torch.empty(BINS, dtype=torch.int64)
    arrays = [tensor.numpy() for tensor in (x, total, squares, low, high, counts)]
    # Beginning at the reach that earlier calls found spares widening; the result may be wider than x alone needs, never than both do.
    found = kernels._native().statistics(isa, *arrays, exponent, torch.get_num_threads())
    if found is None:
        refuse(x)
    return total, squares, low, high, Histogram.of_counts(counts, found)


def _isa() -> str | None:
    """The fastest native kernel here, or the one that FEWBITS_KERNEL forces; None: torch."""
    if kernels.backend() == "reference":
        return None
    isas: list[str] = getattr(kernels._native(), "statistics_isas", list)()  # fastest first; a module built before has none
    return kernels.fastest(isas)
