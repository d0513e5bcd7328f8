"""Which range of an activation to quantize: estimators that read a histogram, and what each range costs.

A wide range rounds coarsely, a narrow one clips. Every estimator gives a `Range`; `Levels` turns it into a scale and a zero point.
A histogram is read as if the values of a bin were spread evenly over it: a threshold is known to a bin (1/1024 of the largest |x|
at worst), and an error to a few parts in a thousand where bins are well filled. Placing all values at the centre of their bin was tried:
steps that are a few bins wide then meet the centres in a pattern, errors come out up to 4 % wrong and thresholds up to 65 bins off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn.functional import pad as _pad

from fewbits.calibration.histogram import HALF, SMALLEST, Histogram
from fewbits.errors import InputError

_PERCENTILES = ("99.9", "99.99", "99.999")
_AT_ONCE = 128  # ranges tried together: their 256 levels in float64 stay in the cache
_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Range:
    low: float
    high: float
    method: str


@dataclass(frozen=True)
class Levels:
    """The values that a quantized activation can take, times a scale; with a zero point, also shifted by it."""

    name: str
    values: tuple[float, ...]  # rising
    zero_point: bool = False
    dtype: torch.dtype | None = None  # of a small float; None: consecutive integers

    def affine(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """(scale, zero) of each range, float64; scales are rounded to float32, as they are stored. Zero always has its own level, so a
        range is widened to include it. The range from 0 to 0 gets the scale 1."""
        low, high = low.double().clamp(max=0), high.double().clamp(min=0)
        spread, steps = (high - low, self.values[-1] - self.values[0]) if self.zero_point else (torch.maximum(-low, high), self.values[-1])
        scale = spread / steps
        scale = torch.where(scale == 0, 1.0, scale.clamp(_TINY, _HUGE)).float().double()
        if not self.zero_point:
            return scale, torch.zeros_like(scale)
        return scale, (self.values[0] - low / scale).round().clamp(self.values[0], self.values[-1])

    def covers(self, span: Range) -> tuple[float, float]:
        """The range that the levels cover: with zero in it, and symmetric if there is no zero point."""
        if self.zero_point:
            return min(span.low, 0.0), max(span.high, 0.0)
        most = max(-span.low, span.high, 0.0)
        return -most, most


def integers(bits: int, zero_point: bool = False) -> Levels:
    """Integers of so many bits; for 8 bits 0 to 255 with a zero point, otherwise -127 to 127, the same number on both sides."""
    most = 2**bits - 1 if zero_point else 2 ** (bits - 1) - 1
    if most < 1:
        raise InputError(f"{bits} bits leave no levels beside zero", "use 2 bits or more")
    values = range(most + 1) if zero_point else range(-most, most + 1)
    return Levels(f"int{bits}_asymmetric" if zero_point else f"int{bits}", tuple(float(value) for value in values), zero_point)


def floats(name: str, dtype: torch.dtype) -> Levels:
    values = torch.arange(256).to(torch.uint8).view(dtype).float()
    finite: list[float] = values[values.isfinite()].unique().tolist()
    return Levels(name, tuple(finite), dtype=dtype)


INT8, INT8_ASYMMETRIC = integers(8), integers(8, zero_point=True)
FP8_E4M3, FP8_E5M2 = floats("fp8_e4m3", torch.float8_e4m3fn), floats("fp8_e5m2", torch.float8_e5m2)
LEVELS = {levels.name: levels for levels in (INT8, INT8_ASYMMETRIC, FP8_E4M3, FP8_E5M2)}


class MovingAverage:
    """The least and greatest value of each batch, averaged: a batch's weight fades by `momentum` with every later one.

    The order of batches matters: at 0.99 the last 69 of them decide half of the result. The first batch stands for all before it."""

    def __init__(self, momentum: float = 0.99) -> None:
        if not 0 <= momentum < 1:
            raise InputError(f"a momentum of {momentum} is not in [0, 1)", "0.99 is usual")
        self.momentum = momentum
        self._ends: tuple[float, float] | None = None

    def add_extremes(self, low: float, high: float) -> None:
        before = self._ends or (low, high)
        new = 1 - self.momentum
        self._ends = before[0] + new * (low - before[0]), before[1] + new * (high - before[1])

    def range(self) -> Range:
        if self._ends is None:
            raise InputError("a moving average needs one batch at least", "feed it batches with `add_extremes`")
        return Range(*self._ends, "moving_average")


def all() -> tuple[str, ...]:
    return ("minmax", "moving_average", *(f"percentile_{share}" for share in _PERCENTILES), "entropy", "mse")


def estimate(name: str, histogram: Histogram, levels: Levels, moving: MovingAverage | None = None) -> Range:
    """The range that an estimator finds. A moving average does not follow from the histogram and has to be given as `moving`."""
    if histogram.total == 0:
        raise InputError("a range cannot be estimated from no values", "run more text through the model")
    if name == "moving_average":
        if moving is None:
            raise InputError("a moving average depends on batches, which a histogram forgets", "feed a `MovingAverage` batch by batch")
        return moving.range()
    if _outermost(histogram) == (0, 0) and name in all():
        return Range(0.0, 0.0, name)
    if name == "minmax":
        return _within(histogram, math.inf, name)
    if name.startswith("percentile_"):
        return _percentile(histogram, levels, name.removeprefix("percentile_"))
    if name == "entropy":
        return _entropy(histogram, levels)
    if name == "mse":
        return _mse(histogram, levels)
    raise InputError(f"no range estimator is named `{name}`", f"known estimators: {', '.join(all())}")


def _percentile(histogram: Histogram, levels: Levels, percent: str) -> Range:
    """The fewest whole bins that hold this share of all |x|. With a zero point, half of the rest is clipped on each side."""
    kept, total, width = _share(percent), histogram.total, histogram.width
    if not levels.zero_point:
        held = _folded(histogram.counts).cumsum(0)
        bins = int(torch.searchsorted(held, _rank(kept, total))) + 1
        return Range(-bins * width, bins * width, f"percentile_{percent}")
    rank = _rank((1 + kept) / 2, total)
    above = int(torch.searchsorted(histogram.counts.cumsum(0), rank)) + 1
    below = int(torch.searchsorted(histogram.counts.flip(0).cumsum(0), rank)) + 1
    return Range((HALF - below) * width, (above - HALF) * width, f"percentile_{percent}")


def _entropy(histogram: Histogram, levels: Levels) -> Range:
    """The threshold on |x| of TensorRT's calibration: least KL from the clipped histogram to the quantized one.

    For a threshold of i bins, P is the first i bins, with all counts beyond added to the last. Q is the first i bins, cut into 128
    intervals (one per level from zero up), the count of each spread evenly over those of its bins that are not empty in P. The
    threshold is (i + 1/2) bins for the first i of least KL(P, Q); i ends at the largest value. TensorRT has no such rule for floats:
    here a bin belongs to the level nearest to its centre.
    """
    folded = _folded(histogram.counts)
    filled = int(folded.nonzero().max()) + 1
    one_sided = not bool(histogram.counts[:HALF].any())
    intervals = sum(value >= 0 for value in levels.values) // (2 if levels.zero_point and not one_sided else 1)
    if intervals > HALF:
        raise InputError(f"{levels.name} has more levels than the histogram has bins", "choose another estimator")
    i = torch.arange(intervals, max(intervals, filled) + 1)
    starts = _interval_starts(levels, intervals, i)  # (candidates, intervals + 1)

    counts = folded.double()
    inside, outside = _prefix(counts)[i], counts.sum() - _prefix(counts)[i]
    last = counts[i - 1] + outside
    p_log_p = _prefix(torch.xlogy(counts, counts))[i - 1] + torch.xlogy(last, last)
    in_interval = _prefix(counts)[starts].diff(dim=1)
    bins = _prefix((counts > 0).double())[starts].diff(dim=1)
    bins[:, -1] += (counts[i - 1] == 0) & (outside > 0)
    p_inside = in_interval.clone()
    p_inside[:, -1] += outside
    # an interval that holds only clipped values has Q = 0 where P > 0: the logarithm of zero makes its KL infinite
    p_log_q = torch.xlogy(p_inside, in_interval / bins.clamp(min=1)).sum(dim=1) - counts.sum() * inside.log()
    kl = torch.where(inside > 0, p_log_p - p_log_q, torch.inf) / counts.sum() - counts.sum().log()
    # differences below 1e-12 come from rounding: terms have the size of log(total)
    best = int(i[kl <= kl.min() + 1e-12].min())
    return _within(histogram, (best + 0.5) * histogram.width, "entropy", symmetric=not levels.zero_point)


def _mse(histogram: Histogram, levels: Levels) -> Range:
    """The edges with the least squared error of rounding and clipping. Without a zero point every edge is tried. With one, both ends
    first shrink together; then every edge is tried for one end with the other fixed, in turns until neither moves."""
    low, high = _outermost(histogram)
    errors = _Errors(histogram, levels)
    if not levels.zero_point:
        ends = torch.arange(1, max(-low, high) + 1)
        best = int(ends[errors.of(-ends, ends).argmin()])
        return Range(-best * histogram.width, best * histogram.width, "mse")
    both = torch.arange(1, 257) / 256
    together = int(errors.of((low * both).floor(), (high * both).ceil()).argmin())
    a, b = int((low * both[together]).floor()), int((high * both[together]).ceil())
    lows, highs = torch.arange(low, 1), torch.arange(0, high + 1)
    for _ in range(8):  # two or three are usual
        before = a, b
        b = int(highs[errors.of(torch.full_like(highs, a), highs).argmin()])
        a = int(lows[errors.of(lows, torch.full_like(lows, b)).argmin()])
        if (a, b) == before:
            break
    return Range(a * histogram.width, b * histogram.width, "mse")


@dataclass(frozen=True)
class Cost:
    clipped: float  # share of values outside the range, by the centre of their bin
    error: float  # mean squared error of rounding and clipping, over the mean square
    kl: float  # in nats; see `evaluate`


def evaluate(span: Range, histogram: Histogram, levels: Levels) -> Cost:
    """What a range costs. KL is from the histogram to the one that its rounded values give: the count of each level is spread evenly over
    the filled bins that round to it, including those beyond the range."""
    if histogram.total == 0:
        raise InputError("a range cannot be judged by no values", "run more text through the model")
    if _outermost(histogram) == (0, 0):
        return Cost(0.0, 0.0, 0.0)
    counts, centres = histogram.counts.double(), histogram.centres
    low, high = levels.covers(span)
    clipped = counts[(centres < low) | (centres > high)].sum() / counts.sum()
    errors, (low_end, high_end) = _Errors(histogram, levels), (end / histogram.width for end in _ends(span))
    values = errors.levels_of(low_end, high_end)[0]
    level = torch.bucketize(centres / histogram.width, (values[1:] + values[:-1]) / 2)
    in_level = counts.new_zeros(len(values)).index_add_(0, level, counts)
    bins = counts.new_zeros(len(values)).index_add_(0, level, (counts > 0).double())
    kl = (torch.xlogy(counts, counts).sum() - torch.xlogy(in_level, in_level / bins.clamp(min=1)).sum()) / counts.sum()
    return Cost(clipped.item(), (errors.of(low_end, high_end) / errors.squares).item(), max(kl.item(), 0.0))


class _Errors:
    """Squared errors of many ranges at once. The values that round to one level are contiguous, so prefix sums of the density and of x
    times the density, taken at the middles between levels, are enough. Lengths are in bins."""

    def __init__(self, histogram: Histogram, levels: Levels) -> None:
        counts, centres = histogram.counts.double(), torch.arange(-HALF, HALF, dtype=torch.float64) + 0.5
        self._counts = _pad(counts, (0, 1))
        self._n, self._nx = _prefix(counts), _prefix(counts * centres)
        self.squares = (counts * (centres**2 + 1 / 12)).sum()  # of all values: the error if all became zero
        self._levels, self._width = levels, histogram.width

    def levels_of(self, low: Tensor, high: Tensor) -> Tensor:  # ends (ranges,) -> (ranges, levels)
        scale, zero = self._levels.affine(low.double() * self._width, high.double() * self._width)
        return (torch.tensor(self._levels.values, dtype=torch.float64) - zero[:, None]) * (scale / self._width)[:, None]

    def of(self, low: Tensor, high: Tensor) -> Tensor:  # ends (ranges,) -> sums of squares (ranges,)
        return torch.cat([self._of(*ends) for ends in zip(low.split(_AT_ONCE), high.split(_AT_ONCE), strict=True)])

    def _of(self, low: Tensor, high: Tensor) -> Tensor:
        levels = self.levels_of(low, high)
        middles = ((levels[:, 1:] + levels[:, :-1]) / 2).clamp(-HALF, HALF)
        at = _pad(_pad(middles, (1, 0), value=-HALF), (0, 1), value=HALF)
        edge = at.floor()
        part, bins = at - edge, (edge + HALF).long()
        count = self._counts[bins] * part
        n = self._n[bins] + count
        nx = self._nx[bins] + count * (edge + part / 2)
        return (self.squares - (levels * (2 * nx.diff(dim=1) - levels * n.diff(dim=1))).sum(dim=1)).clamp(min=0)


def _interval_starts(levels: Levels, intervals: int, i: Tensor) -> Tensor:
    """The first bin of each level if i bins cover them all, and i at the end. Computed in integers, so that rounding decides no tie."""
    i = i[:, None]
    if levels.dtype is None:
        return (torch.arange(intervals + 1) * i + intervals - 1) // intervals  # bin b belongs to interval floor(b * intervals / i)
    values = torch.tensor([value for value in levels.values if value >= 0], dtype=torch.float64)
    twice_middles = ((values[1:] + values[:-1]) * 2**17).long()  # whole numbers: e5m2's least value is 2 ** -16
    most = int(values[-1]) * 2**17
    # the first b with (b + 1/2) / i >= middle / most
    inner = (twice_middles * i - most + 2 * most - 1) // (2 * most)
    return torch.cat([torch.zeros_like(i), inner, i], dim=1)


def _prefix(counts: Tensor) -> Tensor:
    """Sums of the first 0, 1, 2, ... entries."""
    return _pad(counts.cumsum(0), (1, 0))


def _folded(counts: Tensor) -> Tensor:
    return counts[HALF:] + counts[:HALF].flip(0)


def _outermost(histogram: Histogram) -> tuple[int, int]:
    """The edges, in bins, that enclose every value and zero; (0, 0) if all values are within the narrowest bin."""
    filled = histogram.counts.nonzero()
    low, high = min(int(filled.min()) - HALF, 0), max(int(filled.max()) + 1 - HALF, 0)
    return (0, 0) if histogram.exponent == SMALLEST and max(-low, high) == 1 else (low, high)


def _within(histogram: Histogram, threshold: float, method: str, symmetric: bool = False) -> Range:
    if symmetric:
        return Range(-threshold, threshold, method)
    low, high = (end * histogram.width for end in _outermost(histogram))
    return Range(max(low, -threshold), min(high, threshold), method)


def _share(percent: str) -> Fraction:
    try:
        kept = Fraction(percent) / 100
    except ValueError:
        kept = Fraction(0)
    if not 0 < kept <= 1:
        raise InputError(f"`{percent}` is not a percentage above 0", f"known estimators: {', '.join(all())}")
    return kept


def _rank(share: Fraction, total: int) -> int:
    """How many values make up at least this share, exactly: 0.999 * total would be rounded."""
    return math.ceil(share * total)


def _ends(span: Range) -> tuple[Tensor, Tensor]:
    return torch.tensor([span.low], dtype=torch.float64), torch.tensor([span.high], dtype=torch.float64)
