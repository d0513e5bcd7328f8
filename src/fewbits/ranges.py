"""Which range of an activation to quantize: estimators that read a histogram (or stored values), and what each range costs.

A wide range rounds coarsely, a narrow one clips. Every estimator gives a `Range`; `Levels` turns it into a scale and a zero point.
A histogram is read as if the values of a bin were spread evenly over it: a threshold is known to a bin (1/1024 of the largest |x|
at worst), and an error to a few parts in a thousand where bins are well filled. Taking a bin's centre for all its values was tried:
steps that are a few bins wide then meet the centres in a pattern, errors come out up to 4 % wrong and thresholds up to 65 bins off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn.functional import pad as _pad

from fewbits.calibration.histogram import HALF, SMALLEST, Histogram, exponent_above
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
        """(scale, zero) of each range, float64; scales are rounded to float32, as they are stored. Zero always has a level of its own,
        so a range is widened to include it. A range of nothing but zero gets the scale 1."""
        low, high = low.double().clamp(max=0), high.double().clamp(min=0)
        spread, steps = (high - low, self.values[-1] - self.values[0]) if self.zero_point else (torch.maximum(-low, high), self.values[-1])
        scale = spread / steps
        scale = torch.where(scale == 0, 1.0, scale.clamp(_TINY, _HUGE)).float().double()
        if not self.zero_point:
            return scale, torch.zeros_like(scale)
        return scale, (self.values[0] - low / scale).round().clamp(self.values[0], self.values[-1])

    def scale(self, span: Range) -> float:
        return self.affine(*_ends(span))[0].item()

    def zero(self, span: Range) -> int:
        return int(self.affine(*_ends(span))[1].item())

    def covers(self, span: Range) -> tuple[float, float]:
        """What a range really spans: zero included, and without a zero point as far down as up."""
        if self.zero_point:
            return min(span.low, 0.0), max(span.high, 0.0)
        most = max(-span.low, span.high, 0.0)
        return -most, most

    def round(self, x: Tensor, span: Range) -> Tensor:
        """x as it comes back from its levels: float32, the same shape."""
        scale, zero = (entry.float() for entry in self.affine(*_ends(span)))
        steps = x.float() / scale
        if self.dtype is not None:
            return steps.clamp(self.values[0], self.values[-1]).to(self.dtype).float() * scale
        return ((steps.round() + zero).clamp(self.values[0], self.values[-1]) - zero) * scale


def integers(bits: int, zero_point: bool = False) -> Levels:
    """Integers of this many bits: 0 to 255 with a zero point, otherwise -127 to 127, as many on both sides."""
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

    The order of batches matters: at 0.99 the last 69 of them make half of the result. The first batch counts as the whole past."""

    def __init__(self, momentum: float = 0.99) -> None:
        if not 0 <= momentum < 1:
            raise InputError(f"a momentum of {momentum} is not in [0, 1)", "0.99 is usual")
        self.momentum = momentum
        self._ends: tuple[float, float] | None = None

    def add(self, batch: Tensor) -> None:
        if batch.numel():
            exponent_above(batch.detach().reshape(-1).float())  # refuses what is not finite
            self.add_extremes(*(end.item() for end in torch.aminmax(batch)))

    def add_extremes(self, low: float, high: float) -> None:
        before = self._ends or (low, high)
        new = 1 - self.momentum
        self._ends = before[0] + new * (low - before[0]), before[1] + new * (high - before[1])

    def range(self) -> Range:
        if self._ends is None:
            raise InputError("a moving average needs one batch at least", "feed it batches with `add`")
        return Range(*self._ends, "moving_average")


def all() -> tuple[str, ...]:
    return ("minmax", "moving_average", *(f"percentile_{share}" for share in _PERCENTILES), "entropy", "mse")


def estimate(name: str, histogram: Histogram, levels: Levels, moving: MovingAverage | None = None) -> Range:
    """The range that an estimator finds. A moving average is no function of the histogram: whoever saw the batches hands it over."""
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


def estimate_stored(name: str, x: Tensor, levels: Levels) -> Range:
    """The same from values that are all there: least, greatest and percentiles are then exact, not whole bins."""
    values = x.detach().reshape(-1).float()
    histogram = Histogram.of(values)
    if len(values) == 0 or not name.startswith(("minmax", "percentile_")):
        return estimate(name, histogram, levels)
    if name == "minmax":
        return Range(values.min().item(), values.max().item(), name)
    kept = _share(name.removeprefix("percentile_"))
    if not levels.zero_point:
        most = values.abs().kthvalue(_rank(kept, len(values))).values.item()
        return Range(-most, most, name)
    rank = _rank((1 + kept) / 2, len(values))
    return Range(-(-values).kthvalue(rank).values.item(), values.kthvalue(rank).values.item(), name)


def per_channel(low: Tensor, high: Tensor, levels: Levels) -> tuple[Tensor, Tensor]:
    """(scale, zero) of each channel from its least and greatest value."""
    if not bool((low <= high).all() and low.isfinite().all() and high.isfinite().all()):
        raise InputError(
            "a channel has no range: its least and greatest value are not two finite numbers in order", "count some tokens first"
        )
    return levels.affine(low, high)


def _percentile(histogram: Histogram, levels: Levels, percent: str) -> Range:
    """The narrowest whole bins that hold this share of all |x|. With a zero point, each side loses half of what is left out."""
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
    """The threshold on |x| that TensorRT's calibration takes: least KL from the clipped histogram to its quantized self.

    For a threshold of i bins, P is the first i bins with all that lies beyond added to the last. Q is the first i bins as
    they are, cut into 128 runs (as many as there are levels from zero up), each run's count spread evenly over the bins of it that
    P does not leave empty. The threshold is (i + 1/2) bins for the i of least KL(P, Q), the first of equals; i ends at the
    largest value. For floats, which TensorRT does not treat so, bins go with the level that is nearest to their centre.
    """
    folded = _folded(histogram.counts)
    filled = int(folded.nonzero().max()) + 1
    one_sided = not bool(histogram.counts[:HALF].any())
    runs = sum(value >= 0 for value in levels.values) // (2 if levels.zero_point and not one_sided else 1)
    if runs > HALF:
        raise InputError(f"{levels.name} has more levels than the histogram has bins", "choose another estimator")
    i = torch.arange(runs, max(runs, filled) + 1)
    starts = _run_starts(levels, runs, i)  # (candidates, runs + 1)

    counts = folded.double()
    inside, outside = _prefix(counts)[i], counts.sum() - _prefix(counts)[i]
    last = counts[i - 1] + outside
    p_log_p = _prefix(torch.xlogy(counts, counts))[i - 1] + torch.xlogy(last, last)
    in_run = _prefix(counts)[starts].diff(dim=1)
    bins = _prefix((counts > 0).double())[starts].diff(dim=1)
    bins[:, -1] += (counts[i - 1] == 0) & (outside > 0)
    p_in_run = in_run.clone()
    p_in_run[:, -1] += outside
    # a run that holds nothing but what was clipped has Q = 0 under P > 0: the logarithm of zero makes its KL infinite
    p_log_q = torch.xlogy(p_in_run, in_run / bins.clamp(min=1)).sum(dim=1) - counts.sum() * inside.log()
    kl = torch.where(inside > 0, p_log_p - p_log_q, torch.inf) / counts.sum() - counts.sum().log()
    # what rounding makes of equal sums is not a difference: terms are of the size of log(total)
    best = int(i[kl <= kl.min() + 1e-12].min())
    return _within(histogram, (best + 0.5) * histogram.width, "entropy", symmetric=not levels.zero_point)


def _mse(histogram: Histogram, levels: Levels) -> Range:
    """The edges with the least squared error of rounding and clipping. Without a zero point every edge is tried; with one, both ends
    shrink together first and then each in turn until neither moves: every edge for that end, the other held."""
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
    clipped: float  # share of values outside of the range, by the centre of their bin
    error: float  # mean squared error of rounding and clipping, over the mean square
    kl: float  # in nats; see `evaluate`


def evaluate(span: Range, histogram: Histogram, levels: Levels) -> Cost:
    """What a range costs. KL is that of the histogram from what its rounded self tells of it: each level's count spread evenly over
    the filled bins that round to it, those beyond the range included."""
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
    """Squared errors of many ranges at once. What rounds to one level lies together, so running integrals of the density and of x
    times it, taken where levels meet, say it all. Lengths are in bins."""

    def __init__(self, histogram: Histogram, levels: Levels) -> None:
        counts, centres = histogram.counts.double(), torch.arange(-HALF, HALF, dtype=torch.float64) + 0.5
        self._counts = _pad(counts, (0, 1))
        self._n, self._nx = _prefix(counts), _prefix(counts * centres)
        self.squares = (counts * (centres**2 + 1 / 12)).sum()  # of all values: the error of a range of nothing
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


def _run_starts(levels: Levels, runs: int, i: Tensor) -> Tensor:
    """Where each level's run of bins begins when i bins span them all, and i at the end; in integers, to leave no tie to rounding."""
    i = i[:, None]
    if levels.dtype is None:
        return (torch.arange(runs + 1) * i + runs - 1) // runs  # bin b belongs to run floor(b * runs / i)
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
    """The edges, in bins, that hold every value and zero. Where nothing was wider than the narrowest bin, all counts as zero."""
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
    """How many values make up at least this share: exact, which 0.999 * total would not be."""
    return math.ceil(share * total)


def _ends(span: Range) -> tuple[Tensor, Tensor]:
    return torch.tensor([span.low], dtype=torch.float64), torch.tensor([span.high], dtype=torch.float64)
