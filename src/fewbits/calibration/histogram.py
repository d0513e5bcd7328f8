"""A histogram of activations that widens as larger values arrive: one pass, exact counts, the same for any order or batching."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fewbits.errors import InputError

BINS = 4096  # half of them for each sign: a bin is reach / 2048 wide, so |x| is known to 1/1024 of the largest, or better
HALF = BINS // 2
SMALLEST = -100  # exponent of the narrowest reach: subnormal values then fall beside zero, whether the processor flushes them or not
_LARGEST = 128  # float32 ends below 2 ** 128
_AT_ONCE = 1 << 20  # values binned at a time: bounds the indices' memory


class Histogram:
    """Counts of values in 4096 bins over (-reach, reach), where reach is the least power of two above every |x| (2 ** -100 at least).

    A value is in bin 2048 + m from zero up and in bin 2047 - m below zero, with m = floor(|x| / width). Twice the width turns m into
    m // 2, so widening adds bins in pairs and is exact. The result depends on the values only, not on their order, on batches or on
    merging. Negative zero counts as zero.
    """

    def __init__(self) -> None:
        self._exponent = SMALLEST
        self._counts = torch.zeros(BINS, dtype=torch.int64)

    @classmethod
    def of(cls, x: Tensor) -> Histogram:
        histogram = cls()
        histogram.add(x)
        return histogram

    @classmethod
    def of_counts(cls, counts: Tensor, exponent: int) -> Histogram:
        """From counts of other code at reach 2 ** exponent, which must be the least that holds them."""
        histogram = cls()
        histogram._counts, histogram._exponent = counts, exponent
        return histogram

    @property
    def exponent(self) -> int:
        return self._exponent

    @property
    def reach(self) -> float:
        return 2.0**self._exponent

    @property
    def width(self) -> float:
        return 2.0**self._exponent / HALF

    @property
    def counts(self) -> Tensor:  # (4096,) int64, from the lowest bin up; not to be written to
        return self._counts

    @property
    def total(self) -> int:
        return int(self._counts.sum())

    @property
    def centres(self) -> Tensor:  # (4096,) float64
        return (torch.arange(-HALF, HALF, dtype=torch.float64) + 0.5) * self.width

    def add(self, x: Tensor) -> None:
        """Count every value of x, whatever its shape. Nothing is counted if one of them is not finite."""
        values = x.detach().reshape(-1).to(torch.float32)
        if len(values) == 0:
            return
        self._widen(exponent_above(values))
        for piece in values.split(_AT_ONCE):
            self._counts += torch.bincount(bins_of(piece, self._exponent), minlength=BINS).cpu()

    def merge(self, other: Histogram) -> None:
        """Become the histogram of both sets of values."""
        self._widen(other._exponent)
        self._counts = self._counts + _widened(other._counts, self._exponent - other._exponent)

    def to_tensors(self) -> dict[str, Tensor]:
        return {"counts": self._counts.clone(), "reach": torch.tensor([self.reach], dtype=torch.float64)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Histogram:
        counts, reach = tensors.get("counts"), tensors.get("reach")
        if counts is None or counts.shape != (BINS,) or counts.dtype != torch.int64 or bool((counts < 0).any()):
            raise InputError(f"a histogram needs {BINS} counts in int64, none of them negative", "take the statistics again")
        if reach is None or reach.shape != (1,) or reach.dtype != torch.float64:
            raise InputError("a histogram needs its reach, one float64", "take the statistics again")
        fraction, exponent = math.frexp(float(reach))
        exponent -= 1  # frexp's fraction of a power of two is a half
        if fraction != 0.5 or not SMALLEST <= exponent <= _LARGEST:
            raise InputError(f"a histogram's reach is a power of two, not {float(reach)}", "take the statistics again")
        if exponent > SMALLEST and not bool(counts[: HALF // 2].any() or counts[-HALF // 2 :].any()):
            raise InputError(f"no value of the histogram needs its reach of {float(reach)}", "take the statistics again")
        return cls.of_counts(counts.clone(), exponent)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Histogram) and self._exponent == other._exponent and torch.equal(self._counts, other._counts)

    __hash__ = None  # type: ignore[assignment]  # it changes as values are added

    def __repr__(self) -> str:
        return f"Histogram({self.total} values, reach {self.reach})"

    def _widen(self, exponent: int) -> None:
        if exponent > self._exponent:
            self._counts = _widened(self._counts, exponent - self._exponent)
            self._exponent = exponent


def exponent_above(values: Tensor) -> int:
    """The least exponent, from SMALLEST up, whose power of two is above every |x|; `values` is float32 and not empty."""
    low, high = torch.aminmax(values)  # NaN propagates
    largest = max(abs(low.item()), abs(high.item()))
    if not math.isfinite(largest) or math.isnan(low.item()):
        refuse(values)
    return max(SMALLEST, math.frexp(largest)[1] if largest else SMALLEST)


def refuse(values: Tensor) -> None:
    """Raises an error that says how many values are not finite."""
    bad = values[~values.isfinite()]
    raise InputError(
        f"{len(bad)} of {values.numel()} activations are not finite; the first is `{bad[0].item()}`",
        "the model overflows on this text: check its weights, or run it in float32",
    )


def bins_of(values: Tensor, exponent: int) -> Tensor:
    """The bin of each float32 value, int64. Scaling by a power of two is exact; results below 2 ** -126 fall beside zero."""
    magnitude = (values.abs() * 2.0 ** (11 - exponent)).to(torch.int64)
    bits = values.view(torch.int32)  # the sign bit: where a thread flushes subnormals, a comparison takes them for zero
    negative = (bits < 0) & (bits != torch.iinfo(torch.int32).min)
    return torch.where(negative, HALF - 1 - magnitude, HALF + magnitude)


def _widened(counts: Tensor, doublings: int) -> Tensor:
    if doublings == 0:
        return counts
    shift = min(doublings, 12)  # after 11, all values are in the two bins beside zero
    old = torch.arange(-HALF, HALF)
    return torch.zeros_like(counts).index_add_(0, (old >> shift) + HALF, counts)
