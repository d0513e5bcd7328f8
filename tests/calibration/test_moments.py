"""Histograms and per-channel statistics: exact counts whatever the order, and native code that gives the reference's bits."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fewbits.calibration.histogram import BINS, HALF, SMALLEST, Histogram
from fewbits.calibration.moments import Moments
from fewbits.devices import processor
from fewbits.errors import InputError

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
LISTS = st.lists(st.one_of(FLOATS, st.floats(-4, 4, width=32), st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e30, -1e-45])), max_size=60)
LARGEST = torch.finfo(torch.float32).max
ISAS = ("scalar", "avx2")


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def slow_histogram(values: list[float]) -> tuple[list[int], Fraction]:
    """Each value's bin by exact fractions, at the least power of two above them all."""
    exact = [Fraction(value) for value in values]
    reach = Fraction(2) ** SMALLEST
    while any(abs(value) >= reach for value in exact):
        reach *= 2
    counts = [0] * BINS
    for value in exact:
        magnitude = math.floor(abs(value) / (reach / HALF))
        counts[HALF - 1 - magnitude if value < 0 else HALF + magnitude] += 1
    return counts, reach


@given(LISTS)
@settings(max_examples=150, deadline=None)
def test_a_histogram_counts_what_fractions_count(values: list[float]) -> None:
    histogram = Histogram.of(tensor(values))
    counts, reach = slow_histogram(tensor(values).tolist())
    assert histogram.counts.tolist() == counts
    assert histogram.reach == reach


@given(LISTS, st.randoms(use_true_random=False), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_order_batches_and_merging_change_nothing(values: list[float], chance: object, size: int) -> None:
    whole = Histogram.of(tensor(values))
    chance.shuffle(values)  # type: ignore[attr-defined]
    batches = [tensor(values[start : start + size]) for start in range(0, len(values), size)]
    added, merged = Histogram(), Histogram()
    for batch in batches:
        added.add(batch)
        merged.merge(Histogram.of(batch))
    assert added == whole
    assert merged == whole
    assert Histogram.from_tensors(whole.to_tensors()) == whole


def test_merging_leaves_the_other_histogram_alone() -> None:
    small, large = Histogram.of(tensor([0.5, -0.25])), Histogram.of(tensor([100.0]))
    copies = [Histogram.from_tensors(h.to_tensors()) for h in (small, large)]
    both = Histogram()
    both.merge(small)
    both.merge(large)
    both.add(tensor([1e9]))
    assert [small, large] == copies


def test_edges_enclose_what_is_counted() -> None:
    torch.manual_seed(0)
    x = torch.randn(1000).double()
    histogram = Histogram.of(x)
    edges = torch.arange(-HALF, HALF + 1, dtype=torch.float64) * histogram.width
    assert histogram.counts.tolist() == torch.histogram(x, edges).hist.long().tolist()  # no value of x lies on an edge
    assert edges[0] == -histogram.reach and edges[-1] == histogram.reach


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_by_name_and_nothing_is_counted(bad: float) -> None:
    histogram = Histogram.of(tensor([1.0]))
    for values in ([bad], [2.0, bad, 3.0], [bad, 2.0]):
        with pytest.raises(InputError, match=str(bad)):
            histogram.add(tensor(values))
    assert histogram == Histogram.of(tensor([1.0]))


@pytest.mark.parametrize(
    "change",
    [
        {"counts": torch.zeros(BINS)},
        {"counts": torch.full((BINS,), -1)},
        {"reach": tensor([1.5]).double()},
        {"reach": tensor([math.nan]).double()},
        {"counts": torch.arange(BINS).eq(HALF).long()},  # nothing lies in the outer half of its reach
        {"reach": None},
    ],
)
def test_a_damaged_histogram_is_refused(change: dict[str, Tensor | None]) -> None:
    tensors = {**Histogram.of(tensor([1.0, 0.1])).to_tensors(), **change}
    with pytest.raises(InputError):
        Histogram.from_tensors({name: value for name, value in tensors.items() if value is not None})


# --- moments ----------------------------------------------------------------------------------------------------------------------


def moments_of(*batches: Tensor) -> Moments:
    moments = Moments(batches[0].shape[1])
    for batch in batches:
        moments.add(batch)
    return moments


def assert_same_bits(a: Moments, b: Moments) -> None:
    assert a.count == b.count and a.histogram == b.histogram
    for name in ("sum", "sum_squares", "low", "high"):
        ours, theirs = getattr(a, name), getattr(b, name)
        assert ours.dtype == theirs.dtype and ours.numpy().tobytes() == theirs.numpy().tobytes(), name


def assert_sums_within(moments: Moments, x: Tensor) -> None:
    """Against exact sums. n additions in float64 err by at most n * 2 ** -53 of the sum of magnitudes; squares are exact."""
    columns = [[Fraction(value) for value in column] for column in x.T.tolist()]
    for col, exact in enumerate(columns):
        bound = Fraction(len(x), 2**52)
        assert abs(Fraction(moments.sum[col].item()) - sum(exact)) <= bound * sum(abs(v) for v in exact)
        assert abs(Fraction(moments.sum_squares[col].item()) - sum(v * v for v in exact)) <= bound * sum(v * v for v in exact)


def needs(isa: str) -> None:
    assert processor.native_missing() is None
    if isa not in processor.native().statistics_isas():
        pytest.skip(f"this processor has no {isa}")


def worst(name: str) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(261, 19)
    match name:
        case "normal":
            return x
        case "equal":
            return torch.full_like(x, -3.7)
        case "zero":
            return torch.zeros_like(x)
        case "negative zero":
            return -torch.zeros_like(x)
        case "outlier":
            x[200, 3] = -4e6
            return x
        case "rising":  # the histogram widens again and again
            return x * torch.logspace(-37, 37, 261)[:, None]
        case "mixed":  # magnitudes so far apart that float64 rounds their sums, and the order shows
            return x * 10 ** torch.empty_like(x).uniform_(-9, 9)
        case "subnormal":
            return x * 1e-40
        case "1e30":
            return x * 1e30
        case _:
            return x.sign() * LARGEST


WORST = ("normal", "equal", "zero", "negative zero", "outlier", "rising", "mixed", "subnormal", "1e30", "largest")


@pytest.mark.parametrize("name", WORST)
@pytest.mark.parametrize("isa", ISAS)
def test_native_gives_the_bits_of_the_reference(isa: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(isa)
    x = worst(name)
    monkeypatch.setenv("FEWBITS_KERNEL", "reference")
    reference = moments_of(x, x[:70] * 0.5, x[:3])
    monkeypatch.setenv("FEWBITS_KERNEL", isa)
    assert_same_bits(moments_of(x, x[:70] * 0.5, x[:3]), reference)


@pytest.mark.parametrize("isa", ISAS)
def test_native_takes_every_shape(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(isa)
    torch.manual_seed(2)
    for rows in (1, 2, 3, 4, 5, 255, 256, 257, 513):
        for cols in (1, 7, 8, 9, 24):
            x = torch.randn(rows, cols)
            monkeypatch.setenv("FEWBITS_KERNEL", "reference")
            reference = moments_of(x)
            monkeypatch.setenv("FEWBITS_KERNEL", isa)
            assert_same_bits(moments_of(x), reference)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [(1200, 300), (4, 90_000), (1, 300_001)])
def test_a_bin_holds_more_than_its_16_bit_copies(isa: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    needs(isa)
    monkeypatch.setenv("FEWBITS_KERNEL", isa)
    histogram = moments_of(torch.full(shape, -1.5)).histogram  # four copies of 16 bits end at 262,140
    assert histogram.counts[HALF - 1 - int(1.5 / histogram.width)] == histogram.total == math.prod(shape)


@pytest.mark.parametrize("isa", ISAS)
def test_any_number_of_threads_gives_the_same_bits(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(isa)
    monkeypatch.setenv("FEWBITS_KERNEL", isa)
    torch.manual_seed(3)
    x = torch.randn(1500, 33) * torch.logspace(-3, 3, 1500)[:, None]  # each thread ends with another reach
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3, 5, 64):
            torch.set_num_threads(threads)
            found.append(moments_of(x))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert_same_bits(other, found[0])


@pytest.mark.parametrize("name", WORST)
def test_sums_are_exact_to_the_rounding_of_float64(name: str) -> None:
    x = worst(name)
    moments = moments_of(x)
    assert_sums_within(moments, x)
    assert torch.equal(moments.low, x.amin(0)) and torch.equal(moments.high, x.amax(0))
    assert moments.histogram == Histogram.of(x)
    assert moments.count == len(x)


def test_merged_statistics_are_those_of_one_run() -> None:
    torch.manual_seed(4)
    x = torch.randn(700, 12).exp()
    merged = moments_of(x[:300])
    merged.merge(moments_of(x[300:301]))
    merged.merge(moments_of(x[301:]))
    merged.merge(Moments(12))
    assert_sums_within(merged, x)
    one = moments_of(x)
    assert merged.count == one.count and merged.histogram == one.histogram
    assert torch.equal(merged.low, one.low) and torch.equal(merged.high, one.high)


@pytest.mark.parametrize("kernel", ["reference", *ISAS])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_moments_refuse_what_is_not_finite_and_stay_as_they_were(kernel: str, bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel != "reference":
        needs(kernel)
    monkeypatch.setenv("FEWBITS_KERNEL", kernel)
    x = torch.ones(300, 11)
    moments = moments_of(x)
    for row, col in ((0, 0), (299, 10), (150, 3)):  # the vector's, the last row's and the last column's code
        spoilt = x.clone()
        spoilt[row, col] = bad
        with pytest.raises(InputError, match=str(bad)):
            moments.add(spoilt)
    assert_same_bits(moments, moments_of(x))


def test_empty_batches_and_other_layouts_are_taken() -> None:
    torch.manual_seed(5)
    x = torch.randn(40, 6)
    expected = moments_of(x)
    moments = moments_of(torch.empty(0, 6), x.T.contiguous().T, torch.empty(0, 6))
    assert_same_bits(moments, expected)
    assert_same_bits(moments_of(x.bfloat16()), moments_of(x.bfloat16().float()))
    with pytest.raises(InputError, match=r"\(40, 6\)"):
        Moments(5).add(x)


def test_an_unknown_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBITS_KERNEL", "avx3")
    with pytest.raises(InputError, match="avx3"):
        Moments(1).add(torch.ones(1, 1))
