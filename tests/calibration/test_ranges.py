"""Range estimators against the obvious computation on stored values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from fewbits.calibration import ranges
from fewbits.calibration.histogram import HALF, Histogram
from fewbits.calibration.ranges import FP8_E4M3, FP8_E5M2, INT8, INT8_ASYMMETRIC, LEVELS, Levels, MovingAverage, Range
from fewbits.errors import InputError

NAMES = [name for name in ranges.all() if name != "moving_average"]
EVERY = pytest.mark.parametrize("levels", LEVELS.values(), ids=lambda levels: levels.name)


def stored(kind: str, count: int = 1 << 16) -> Tensor:
    torch.manual_seed(0)
    match kind:
        case "normal":
            return torch.randn(count)
        case "heavy":
            return torch.distributions.StudentT(3.0).sample((count,))
        case "one-sided":  # half of it zeros
            return torch.randn(count).relu()
        case "shifted":
            return torch.randn(count) * 0.7 + 1.5
        case _:
            x = torch.randn(count)
            x[17] = -900.3  # not on an edge
            return x


KINDS = ("normal", "heavy", "one-sided", "shifted", "outlier")
WITH_KINDS = pytest.mark.parametrize("kind", KINDS)


def width_of(x: Tensor) -> float:
    """Of a bin: 2048 of them reach from zero to the first power of two above every |x|."""
    reach = 1.0
    while reach <= x.abs().max():
        reach *= 2
    while reach / 2 > x.abs().max():
        reach /= 2
    return reach / 2048


# --- twins: slow and plain ----------------------------------------------------------------------------------------------------------


def runs_of(levels: Levels, i: int, one_sided: bool) -> NDArray[np.int64]:
    """Which run each of i bins belongs to."""
    bins = np.arange(i)
    if levels is INT8 or levels is INT8_ASYMMETRIC:
        return bins * (256 if one_sided and levels is INT8_ASYMMETRIC else 128) // i
    values = np.array([value for value in levels.values if value >= 0])
    middles = (values[1:] + values[:-1]) / 2
    return np.searchsorted(middles * i, (bins + 0.5) * values[-1], side="right")  # both sides exact in float64


def slow_entropy(x: Tensor, levels: Levels) -> float:
    width = width_of(x)
    magnitudes = np.floor(x.double().abs().numpy() / width).astype(int)
    one_sided = not bool((x < 0).any())
    bins = np.bincount(magnitudes).astype(float)
    first = {"int8": 128, "int8_asymmetric": 256 if one_sided else 128, "fp8_e4m3": 127, "fp8_e5m2": 124}[levels.name]
    divergences = {}
    for i in range(first, len(bins) + 1):
        p = bins[:i].copy()
        p[-1] += bins[i:].sum()
        run = runs_of(levels, i, one_sided)
        in_run, filled = np.bincount(run, weights=bins[:i]), np.bincount(run, weights=p > 0)
        q = np.where(p > 0, in_run[run] / np.maximum(filled[run], 1), 0)
        p, q = p / p.sum(), q / max(q.sum(), 1e-300)
        used = p > 0
        with np.errstate(divide="ignore"):
            divergences[i] = float((p[used] * np.log(p[used] / q[used])).sum())
    least = min(divergences.values())
    return (min(i for i, kl in divergences.items() if kl <= least + 1e-12) + 0.5) * width


def slow_percentile(x: Tensor, kept_millionths: int) -> float:
    """The least stored value that has at least this share at or below it."""
    values = sorted(x.tolist())
    rank = -(-len(values) * kept_millionths // 1_000_000)
    return values[rank - 1]


def scale_and_zero(levels: Levels, span: Range) -> tuple[float, int]:
    scale, zero = levels.affine(*(torch.tensor([end], dtype=torch.float64) for end in (span.low, span.high)))
    return scale.item(), int(zero.item())


def rounded(x: Tensor, span: Range, levels: Levels) -> Tensor:
    """x as it comes back from its levels."""
    scale, zero = scale_and_zero(levels, span)
    steps, (least, *_, most) = x / torch.tensor(scale).float(), levels.values
    if levels.dtype is not None:
        return steps.clamp(least, most).to(levels.dtype).float() * scale
    return ((steps.round() + zero).clamp(least, most) - zero) * scale


def squared_error(x: Tensor, low: float, high: float, levels: Levels) -> float:
    return float((rounded(x, Range(low, high, ""), levels).double() - x).square().sum())


def evenly_stored(least: int = 16) -> Tensor:
    """Values that fill 1300 bins on one side and 1100 on the other, each bin evenly, `least` values in the emptiest."""
    values = []
    for bin in range(-1100, 1300):
        count = least + int(200 * math.exp(-((bin / 90) ** 2)))
        values.append((bin + (np.arange(count) + 0.5) / count) / 512)
    return torch.from_numpy(np.concatenate(values)).float()


# --- estimators against their twins ---------------------------------------------------------------------------------------------------


@WITH_KINDS
@EVERY
def test_entropy_is_what_a_direct_computation_on_stored_values_gives(levels: Levels, kind: str) -> None:
    x = stored(kind, 1 << 14)
    expected = slow_entropy(x, levels)
    found = ranges.estimate("entropy", Histogram.of(x), levels)
    if levels.zero_point:
        widest = ranges.estimate("minmax", Histogram.of(x), levels)
        assert (found.low, found.high) == (max(widest.low, -expected), min(widest.high, expected))
    else:
        assert (found.low, found.high) == (-expected, expected)


@WITH_KINDS
@pytest.mark.parametrize(("name", "millionths"), [("99.9", 999_000), ("99.99", 999_900), ("99.999", 999_990)])
def test_percentiles_are_those_of_the_stored_values(kind: str, name: str, millionths: int) -> None:
    x, name = stored(kind), f"percentile_{name}"
    histogram, width = Histogram.of(x), width_of(x)
    most = slow_percentile(x.abs(), millionths)
    edge = (math.floor(most / width) + 1) * width
    assert ranges.estimate(name, histogram, INT8) == Range(-edge, edge, name)

    high, low = slow_percentile(x, (1_000_000 + millionths) // 2), -slow_percentile(-x, (1_000_000 + millionths) // 2)
    found = ranges.estimate(name, histogram, INT8_ASYMMETRIC)
    assert found.low <= low <= found.low + width and found.high - width <= high <= found.high


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40), st.sampled_from([1, 50, 99, 100]))
@settings(max_examples=100, deadline=None)
def test_a_percentile_keeps_its_share_and_not_a_bin_more(values: list[float], percent: int) -> None:
    x = torch.tensor(values)
    if bool((x == 0).all()):
        return
    histogram = Histogram.of(x)
    edge = ranges.estimate(f"percentile_{percent}", histogram, INT8).high
    assert (x.abs() <= edge).sum() * 100 >= percent * len(x)
    assert (x.abs() < edge - histogram.width).sum() * 100 < percent * len(x)


@pytest.mark.parametrize("levels", [INT8, FP8_E4M3, ranges.integers(4)], ids=lambda levels: levels.name)
def test_mse_search_is_within_a_bin_of_brute_force_over_stored_values(levels: Levels) -> None:
    x = evenly_stored()
    histogram = Histogram.of(x)
    width, found = histogram.width, ranges.estimate("mse", Histogram.of(x), levels).high
    errors = [squared_error(x, -i * width, i * width, levels) for i in range(1, 1301)]
    assert abs(found / width - (1 + int(np.argmin(errors)))) <= 1


def test_mse_search_with_a_zero_point_finds_what_a_grid_of_both_ends_finds() -> None:
    x = evenly_stored()
    x = torch.cat([x, x[x > 1.5]])  # the ends want different places
    levels, histogram = ranges.integers(5, zero_point=True), Histogram.of(x)
    found = ranges.estimate("mse", histogram, levels)
    best = min(
        squared_error(x, -low * histogram.width, high * histogram.width, levels)
        for low in range(100, 1101, 40)
        for high in range(100, 1301, 40)
    )
    # 16 values spread evenly over a bin lie within 1/32 of a bin of an even density, and a distance to the nearest level changes by
    # no more than the value does: so much may either root mean square be off
    slack = 2 * histogram.width / 32 * math.sqrt(len(x))
    assert math.sqrt(squared_error(x, found.low, found.high, levels)) <= math.sqrt(best) + slack


@WITH_KINDS
@EVERY
def test_costs_are_those_of_the_stored_values(levels: Levels, kind: str) -> None:
    x = stored(kind)
    histogram = Histogram.of(x)
    for name in NAMES:
        span = ranges.estimate(name, histogram, levels)
        cost, (low, high) = ranges.evaluate(span, histogram, levels), levels.covers(span)
        outside = int(((x < low) | (x > high)).sum())
        middle_bins = int(((x.abs() / histogram.width).floor() * histogram.width + histogram.width / 2 == max(-low, high)).sum())
        assert abs(cost.clipped * len(x) - outside) <= middle_bins + 1e-6  # entropy's threshold lies within a bin, others on edges
        off = rounded(x, span, levels).double() - x
        # Two bounds. A value moved inside its bin moves its distance to a level by no more than a bin: holds for any data. And the
        # sum of n squares of values placed by chance inside their bins strays by 6 of its own standard deviations at most.
        error = cost.error * float((histogram.counts * (histogram.centres**2 + histogram.width**2 / 12)).sum())
        assert abs(math.sqrt(error) - float(off.norm())) <= histogram.width * math.sqrt(len(x))
        if kind in ("normal", "shifted"):  # many bins, and no spike of equal values inside one
            assert abs(error - float(off.square().sum())) <= 6 * float(off.square().norm())


@EVERY
@pytest.mark.parametrize(("low", "high"), [(-2.0, 2.0), (-0.3, 0.31), (-1.0, 0.2), (-0.01, 0.02)])
def test_errors_are_those_of_an_even_density_in_every_bin(levels: Levels, low: float, high: float) -> None:
    count, bins = 2000, [-1500, -37, -3, -1, 0, 1, 5, 200, 1201, 2040]
    x = torch.cat([(bin + (torch.arange(count, dtype=torch.float64) + 0.5) / count) / 1024 for bin in bins]).float()
    histogram, span = Histogram.of(x), Range(low, high, "given")
    assert histogram.counts[torch.tensor(bins) + HALF].tolist() == [count] * len(bins)
    mean_square = float((histogram.counts * (histogram.centres**2 + histogram.width**2 / 12)).sum()) / len(x)
    found = math.sqrt(ranges.evaluate(span, histogram, levels).error * mean_square)
    # an even density moves to these values by half of their distance at most, and with it the root mean square; float32 has its ulps
    assert abs(found - math.sqrt(squared_error(x, low, high, levels) / len(x))) <= histogram.width / count / 2 + 2 * 2**-23


@EVERY
def test_kl_of_a_range_is_the_direct_sum(levels: Levels) -> None:
    x = stored("shifted", 5000)
    histogram, span = Histogram.of(x), Range(-1.2345, 2.3456, "given")
    scale, zero = scale_and_zero(levels, span)
    values = (torch.tensor(levels.values, dtype=torch.float64) - zero) * scale
    nearest = (histogram.centres[:, None] - values).abs().argmin(dim=1).tolist()
    counts = histogram.counts.tolist()
    expected = 0.0
    for bin, count in enumerate(counts):
        if count:
            mates = [other for other in range(len(counts)) if nearest[other] == nearest[bin] and counts[other]]
            q = sum(counts[other] for other in mates) / len(mates) / len(x)
            expected += count / len(x) * math.log(count / len(x) / q)
    assert ranges.evaluate(span, histogram, levels).kl == pytest.approx(expected, rel=1e-9)  # sums of 2,000 terms in float64


def test_minmax_holds_every_value_to_a_bin() -> None:
    x = stored("shifted")
    histogram = Histogram.of(x)
    span = ranges.estimate("minmax", histogram, INT8)
    assert span.low <= x.min() < span.low + histogram.width and span.high - histogram.width <= x.max() < span.high


# --- moving average -------------------------------------------------------------------------------------------------------------------


def test_a_moving_average_fades_and_depends_on_the_order_of_batches() -> None:
    batches = [torch.tensor([-1.0, 2.0]), torch.tensor([-3.0, 1.0]), torch.tensor([0.0, 8.0])]  # least and greatest value
    moving = MovingAverage(0.75)
    for batch in batches:
        moving.add_extremes(*batch.tolist())
    low = 0.75 * (0.75 * -1 + 0.25 * -3) + 0.25 * 0
    high = 0.75 * (0.75 * 2 + 0.25 * 1) + 0.25 * 8
    assert (moving.range().low, moving.range().high) == pytest.approx((low, high), rel=1e-15)
    assert ranges.estimate("moving_average", Histogram.of(batches[0]), INT8, moving) == moving.range()
    backwards = MovingAverage(0.75)
    for batch in reversed(batches):
        backwards.add_extremes(*batch.tolist())
    assert backwards.range() != moving.range()


def test_a_moving_average_refuses_what_it_cannot_average() -> None:
    with pytest.raises(InputError, match="batch"):
        MovingAverage().range()
    with pytest.raises(InputError, match="momentum"):
        MovingAverage(1.0)
    with pytest.raises(InputError, match="batches"):
        ranges.estimate("moving_average", Histogram.of(torch.ones(1)), INT8)


# --- levels ---------------------------------------------------------------------------------------------------------------------------


@EVERY
def test_rounding_takes_the_nearest_level(levels: Levels) -> None:
    torch.manual_seed(1)
    x, span = torch.randn(2000) * 2, Range(-2.5, 4.1, "given")
    scale, zero = scale_and_zero(levels, span)
    values = (torch.tensor(levels.values, dtype=torch.float64) - zero) * scale
    nearest = (x[:, None] - values).abs().amin(dim=1)
    # x / scale, rounded to float32, may pass the middle of two levels by half an ulp of x
    assert ((rounded(x, span, levels).double() - x).abs() <= nearest + x.abs() * 2**-22).all()


def test_scales_and_zero_points() -> None:
    span = Range(-1.0, 3.0, "given")
    for levels, wanted, zero in ((INT8, 3 / 127, 0), (INT8_ASYMMETRIC, 4 / 255, 64), (FP8_E4M3, 3 / 448, 0), (FP8_E5M2, 3 / 57344, 0)):
        assert scale_and_zero(levels, span) == (pytest.approx(wanted, rel=2**-24), zero)
    assert (len(INT8.values), len(INT8_ASYMMETRIC.values), len(FP8_E4M3.values), len(FP8_E5M2.values)) == (255, 256, 253, 247)
    positive = Range(2.0, 3.0, "given")  # zero is always among the levels
    assert scale_and_zero(INT8_ASYMMETRIC, positive)[1] == 0 and rounded(torch.zeros(1), positive, INT8_ASYMMETRIC).item() == 0
    assert scale_and_zero(INT8_ASYMMETRIC, Range(-3.0, -2.0, "given"))[1] == 255


# --- worst inputs ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, -0.0, 3.7, -3.7, 1.0, 1e30, -1e30, 1e38, 1e-20, 1e-42])
@EVERY
def test_equal_values_come_back(levels: Levels, value: float) -> None:
    x = torch.full((100,), value)
    for name in NAMES:
        span = ranges.estimate(name, Histogram.of(x), levels)
        assert math.isfinite(span.low) and math.isfinite(span.high) and 0 < scale_and_zero(levels, span)[0] < math.inf, name
        cost = ranges.evaluate(span, Histogram.of(x), levels)
        assert 0 <= cost.clipped <= 1 and 0 <= cost.error <= 1 and cost.kl == 0
        if abs(value) > 1e-30:  # what is smaller counts as zero
            assert ((rounded(x, span, levels) - x).abs() <= abs(value) / 8).all(), name  # an eighth is half of e5m2's coarsest step
            assert cost.clipped == 0 or name == "mse"  # to which either edge of the only bin is as good
        else:
            assert (rounded(x, span, levels) == 0).all()


@EVERY
def test_one_huge_outlier_leaves_every_estimator_standing(levels: Levels) -> None:
    x = stored("normal", 20_000)
    x[5] = 3e30
    histogram = Histogram.of(x)
    for name in NAMES:
        span = ranges.estimate(name, histogram, levels)
        assert rounded(x, span, levels).isfinite().all()
        cost = ranges.evaluate(span, histogram, levels)
        assert all(math.isfinite(part) for part in (cost.clipped, cost.error, cost.kl))
    assert ranges.estimate("percentile_99.9", histogram, levels).high == histogram.width  # one bin: all that the histogram can tell apart


@EVERY
def test_no_values_and_unknown_names_are_refused(levels: Levels) -> None:
    for name in NAMES:
        with pytest.raises(InputError, match="no values"):
            ranges.estimate(name, Histogram(), levels)
    with pytest.raises(InputError, match="no values"):
        ranges.evaluate(Range(0, 1, "given"), Histogram(), levels)
    for wrong in ("median", "percentile_x", "percentile_0", "percentile_101"):
        with pytest.raises(InputError, match=wrong.removeprefix("percentile_")):
            ranges.estimate(wrong, Histogram.of(torch.ones(3)), levels)


def test_entropy_needs_fewer_levels_than_bins() -> None:
    wide = ranges.integers(13)
    assert len(wide.values) > 2 * HALF - 2
    with pytest.raises(InputError, match="more levels"):
        ranges.estimate("entropy", Histogram.of(torch.ones(3)), wide)
