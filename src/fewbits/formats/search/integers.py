"""Groups of weights as 16-bit integers, in which a search for scales compares its trials.

A trial rounds every weight to its level and needs a few weighted sums. In integers these are exact, whatever their order, so native
code (kernels/native/search/quantize_*.inc) takes twice as many weights at a time as floats would allow and still gives the same bits as
torch. Little precision is lost: a weight has 15 bits relative to the largest of its group, its importance as many as 32-bit sums have
room for, and a position between two levels 7 to 12 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits.formats.storage.codes import Levels

if TYPE_CHECKING:
    from typing import Self

MOST = 256  # weights in a group: the sums of more may not fit 32 bits
LARGEST = 1e14  # larger weights, far beyond any float16 scale, are taken as this: its square is finite
_TINY = 1e-37  # a smaller scale counts as zero: its inverse may not be finite
_NOTHING = 1e-30  # a group whose weights are all smaller counts as zeros
_ONE = 32767
FARTHEST = 5.0  # a trial may put the largest weight at five times the last level
_SPAN, _BELOW = 16384.0, 8192.0  # a line's weights: their range, and how far below it the line may begin


@dataclass(frozen=True)
class Steps:
    """How weights become levels, in integers: multiplied by an inverse scale (15 bits of fraction), which leaves `bits` of fraction, then
    clipped and rounded. `thresholds`, where levels are not consecutive: from each on, the next level is taken."""

    bits: int
    low: int
    high: int
    levels: tuple[int, ...] = ()
    thresholds: tuple[int, ...] = ()

    @property
    def reach(self) -> int:
        return max(-self.low, self.high)

    def inverse(self, place: float) -> int:
        """The factor that puts the largest weight at `place`."""
        return round(place * (1 << self.bits))

    def snap(self, x: Tensor, inverse: Tensor | int) -> Tensor:
        y = _product(x, inverse).clamp_(self.low << self.bits, self.high << self.bits)
        if not self.levels:
            return _product(y, 1 << 15 - self.bits)
        return _tensor(self.levels)[torch.bucketize(y, _tensor(self.thresholds), right=True)]


@cache
def steps_for(levels: Levels) -> Steps | None:
    """None: levels are not integers, or too large for 16 bits."""
    farthest = FARTHEST * max(map(abs, levels))
    if not all(level.is_integer() for level in levels) or farthest > 1024:
        return None
    ordered = sorted({int(level) for level in levels})
    bits = next(bits for bits in range(12, 0, -1) if farthest * 2**bits <= _ONE)
    if ordered == list(range(ordered[0], ordered[-1] + 1)):
        return Steps(bits, ordered[0], ordered[-1])
    middles = [(before + after) << bits - 1 for before, after in pairwise(ordered)]
    return Steps(bits, ordered[0], ordered[-1], tuple(ordered), tuple(middles))


@dataclass(frozen=True)
class Fine:
    """Numbers as integers, and the remainders as integers in a finer unit: where one column of a group matters a thousand times as much
    as another, the integers alone leave the other few bits. `high` None: all numbers are one."""

    high: Tensor | None  # (n, groups)
    low: Tensor | None
    low_unit: float
    unit: Tensor  # of the integers

    @classmethod
    def of(cls, x: Tensor, per: Tensor, most: int) -> Self:
        """x * per must not exceed `most`."""
        scaled, low_unit = x * per, 2.0 ** most.bit_length()
        high = scaled.round()
        return cls(high.int(), ((scaled - high) * low_unit).round().int(), 1 / low_unit, _over(1.0, per))

    def dot(self, v: Tensor) -> Tensor:
        """The sum over each group of number * v, in units of `high`."""
        if self.high is None:
            return v.sum(0).float()
        sums = (v * self.high).sum(0).float()
        return sums if self.low is None else sums + (v * self.low).sum(0).float() * self.low_unit


@dataclass(frozen=True)
class Weighted:
    """The factors of a group's sums: importance * weight, and importance."""

    products: Fine
    importance: Fine

    @classmethod
    def of(cls, x: Tensor, importance: Tensor | None, reach: int, sign: Tensor | None = None) -> Self:
        """`reach`: the largest level. With a sign, weights of that sign become positive."""
        weighed = x if importance is None else x * importance
        per = _over(float(_ONE), weighed.abs().amax(0))
        if sign is not None:
            per = torch.copysign(per, sign)
        if importance is None:
            products = Fine((weighed * per).round().int(), None, 0.0, _over(1.0, per))
            return cls(products, Fine(None, None, 0.0, torch.ones_like(per)))
        most = importance_bound(len(x), reach)
        return cls(Fine.of(weighed, per, _ONE), Fine.of(importance, _over(float(most), importance.amax(0)), most))


@dataclass(frozen=True)
class Scaled:
    """x ~ scale * level: the largest weight of each group is 32767."""

    x: Tensor  # (n, groups)
    turn: Tensor  # over a scale: the inverse that `Steps.snap` takes
    sums: Weighted
    steps: Steps

    @classmethod
    def of(cls, x: Tensor, importance: Tensor | None, peak: Tensor, steps: Steps) -> Self:
        per = _over(float(_ONE), peak)
        turn = _over(float(2 ** (15 + steps.bits)), per)
        return cls(_integers(x * per), turn, Weighted.of(x, importance, steps.reach, peak), steps)

    def judge(self, inverse: Tensor | int) -> tuple[Tensor, Tensor]:
        """(sum(wxv), sum(wvv)) of the levels v that this inverse scale rounds to, in units of the integers."""
        v = self.steps.snap(self.x, inverse)
        return self.sums.products.dot(v), self.sums.importance.dot(v * v)

    def inverse(self, scale: Tensor) -> Tensor:
        return _integers((self.turn * inverted(scale)).clamp(-_ONE, _ONE))

    def at(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """(sum(wxv), sum(wvv)) of the levels v that this scale rounds to."""
        along, size = self.judge(self.inverse(scale))
        return along * self.sums.products.unit, size * self.sums.importance.unit


@dataclass(frozen=True)
class Lined:
    """x ~ scale * q - minimum, q in 0..top: the range of each group is 16384, and 8192 is where it begins."""

    x: Tensor  # (n, groups)
    low: Tensor
    per: Tensor  # integers in one
    turn: Tensor
    sums: Weighted
    top: int
    bits: int

    @classmethod
    def of(cls, x: Tensor, importance: Tensor | None, low: Tensor, high: Tensor, top: int) -> Self:
        per, bits = _over(_SPAN, high - low), line_bits(top)
        moved = _integers((x - low) * per) + int(_BELOW)
        return cls(moved, low, per, _over(float(2 ** (15 + bits)), per), Weighted.of(x, importance, top), top, bits)

    def codes(self, begin: Tensor | int, inverse: Tensor | int) -> Tensor:
        y = _product((self.x - begin).clamp_(min=0), inverse).clamp_(max=self.top << self.bits)
        return _product(y, 1 << 15 - self.bits)

    def start(self, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
        """(where a line begins, its inverse scale) in integers."""
        begin = ((-minimum - self.low) * self.per + _BELOW).clamp(0.0, float(_ONE))
        return _integers(begin), _integers((self.turn * inverted(scale)).clamp(max=_ONE))

    def judge(self, begin: Tensor | int, inverse: Tensor | int) -> tuple[Tensor, Tensor, Tensor]:
        """(sum(wqx), sum(wq), sum(wqq)) of the codes q, in units of the integers."""
        q = self.codes(begin, inverse)
        return self.sums.products.dot(q), self.sums.importance.dot(q), self.sums.importance.dot(q * q)

    @cached_property
    def everything(self) -> tuple[Tensor, Tensor]:
        """(sum(w), sum(wx)) in units of the integers."""
        ones = torch.ones_like(self.x)
        return self.sums.importance.dot(ones), self.sums.products.dot(ones)

    @cached_property
    def unit(self) -> Tensor:
        """Of slopes and bases in units of the integers."""
        return self.sums.products.unit * inverted(self.sums.importance.unit)

    def next(self, begin: Tensor | int, inverse: Tensor | int, signed: bool) -> tuple[Tensor, Tensor]:
        """Where the least-squares line for the codes of this one begins, and its inverse scale."""
        sums = self.judge(begin, inverse)
        above, below, lifted = self._slope(sums, signed)
        over = 1 / safe(above * below)
        slope, steepness = above * above * over, torch.where(above == 0, 0.0, below * below * over)
        base = self._base(sums, slope, lifted, signed)
        at = (base * (self.unit * self.per) + (_BELOW - self.low * self.per)).clamp(0.0, float(_ONE))
        return _integers(at), _integers((steepness * (self.turn * inverted(self.unit))).clamp(max=_ONE))

    def fitted(self, begin: Tensor | int, inverse: Tensor | int, signed: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(slope, base, gain) of the least-squares line slope * q + base for the codes q of this one, in units of the integers.
        The base is at most zero, unless `signed`."""
        sums = self.judge(begin, inverse)
        above, below, lifted = self._slope(sums, signed)
        slope = above / below
        base = self._base(sums, slope, lifted, signed)
        (sum_w, sum_x), (sum_qx, sum_q, sum_qq) = self.everything, sums
        gain = slope * (2 * (sum_qx - base * sum_q) - slope * sum_qq) + base * (2 * sum_x - base * sum_w)
        return slope, base, gain

    def _slope(self, sums: tuple[Tensor, Tensor, Tensor], signed: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Numerator and denominator of the slope, and in which groups the line need not go through zero."""
        (sum_w, sum_x), (sum_qx, sum_q, sum_qq) = self.everything, sums
        determinant, rise = sum_w * sum_qq - sum_q * sum_q, sum_w * sum_qx - sum_q * sum_x
        solvable = determinant > 1e-6 * sum_w * sum_qq  # not where all codes are the same: they determine no slope
        if signed:
            return torch.where(solvable, rise, 0.0).clamp(min=0), torch.where(solvable, determinant, 1.0), torch.ones_like(solvable)
        # the stored minimum has no sign: where it would be negative, the line goes through zero
        lifted = solvable & (sum_qq * sum_x <= sum_q * sum_qx)
        above, below = torch.where(lifted, rise, sum_qx).clamp(min=0), safe(torch.where(lifted, determinant, sum_qq))
        return above, below, lifted | (sum_qq == 0)

    def _base(self, sums: tuple[Tensor, Tensor, Tensor], slope: Tensor, lifted: Tensor, signed: bool) -> Tensor:
        sum_w, sum_x = self.everything
        base = (sum_x - slope * sums[1]) * inverted(sum_w)
        return base if signed else torch.where(lifted, base.clamp(max=0), 0.0)


def line_bits(top: int) -> int:
    """Bits of fraction, with room for a line four times as steep as one that spans the range."""
    return next(bits for bits in range(12, 0, -1) if 4.1 * top * 2**bits <= _ONE)


def importance_bound(n: int, reach: int) -> int:
    return min(_ONE, (2**31 - 1) // (n * reach * reach))


def inverted(scale: Tensor) -> Tensor:
    return torch.where(scale.abs() < _TINY, 0.0, 1 / scale)


def safe(divisor: Tensor) -> Tensor:
    return torch.where(divisor == 0, 1.0, divisor)


def _over(amount: float, divisor: Tensor) -> Tensor:
    # a tensor: torch divides a Python number by a tensor as number * (1 / tensor), which rounds twice
    return torch.where(divisor.abs() < _NOTHING, 0.0, torch.tensor(amount) / divisor)


def _integers(x: Tensor) -> Tensor:
    return x.round().int()


def _product(a: Tensor, b: Tensor | int) -> Tensor:
    """a * b / 2^15, rounded: one instruction for 16 bits (pmulhrsw)."""
    return (a * b + (1 << 14)) >> 15


@cache
def _tensor(values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
