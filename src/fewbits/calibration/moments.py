"""Statistics of the inputs of a linear layer in one pass: per channel count, sums and extremes, and a histogram of all values."""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits.calibration.histogram import BINS, Histogram, exponent_above, refuse
from fewbits.devices import processor
from fewbits.errors import InputError

# Sums are always taken in this order, so that native code and torch give the same bits at any number of threads: four rows as
# (a + b) + (c + d), fours one after another into the partial sum of their chunk, chunks one after another. Missing rows are zeros.
CHUNK = 256  # rows; kernels/native/measure/statistics.cc has the same number
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

    def add(self, x: Tensor) -> None:  # x (tokens, cols)
        """Count these tokens. Nothing is counted if one of their values is not finite."""
        if x.ndim != 2 or x.shape[1] != self.cols:
            raise InputError(f"activations of {tuple(x.shape)} were given where (tokens, {self.cols}) are counted")
        x = x.detach().to(torch.float32).contiguous()
        if x.numel() == 0:
            self.count += len(x)
            return
        self._take(len(x), *measured(x, self.histogram.exponent))

    def merge(self, other: Moments) -> None:
        if other.cols != self.cols:
            raise InputError(f"statistics of {other.cols} channels cannot be merged with those of {self.cols}")
        self._take(other.count, other.sum, other.sum_squares, other.low, other.high, other.histogram)

    def _take(self, count: int, total: Tensor, squares: Tensor, low: Tensor, high: Tensor, histogram: Histogram) -> None:
        self.count += count
        self.sum = self.sum + total
        self.sum_squares = self.sum_squares + squares
        self.low = torch.minimum(self.low, low)
        self.high = torch.maximum(self.high, high)
        self.histogram.merge(histogram)


_Taken = tuple[Tensor, Tensor, Tensor, Tensor, Histogram]


def measured(x: Tensor, exponent: int) -> _Taken:
    """Sums, sums of squares, extremes and histogram of (tokens, cols), by the fastest code there is where x is."""
    if x.device.type != "cpu":
        return _on_device(x)
    isa = _isa()
    return _reference(x) if isa is None else _native(x, isa, exponent)


def _on_device(x: Tensor) -> _Taken:
    """Sums of one batch in float32: not every device has float64. They are added up in float64, on the processor."""
    histogram = Histogram.of(x)  # refuses values that are not finite
    low, high = torch.aminmax(x, dim=0)
    return x.sum(0).cpu().double(), x.square().sum(0).cpu().double(), low.cpu() + 0.0, high.cpu() + 0.0, histogram


def _reference(x: Tensor) -> _Taken:
    exponent_above(x)  # refuses values that are not finite
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
    # Beginning at the exponent of earlier calls saves widening. The result may be wider than x alone needs, but not than the sum needs.
    exponent = processor.native().statistics(isa, *arrays, exponent, torch.get_num_threads())
    if exponent is None:
        refuse(x)
    return total, squares, low, high, Histogram.of_counts(counts, exponent)


def _isa() -> str | None:
    """The fastest native kernel of this processor, or the one that FEWBITS_KERNEL forces; None: torch."""
    if processor.backend() == "reference":
        return None
    isas: list[str] = getattr(processor.native(), "statistics_isas", list)()  # fastest first; missing in an older build
    return processor.fastest(isas)
