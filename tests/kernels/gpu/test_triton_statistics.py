"""Statistics of activations in Triton's interpreter, against the histogram of the calibration and float64."""

from __future__ import annotations

import pytest
import torch
from gpu_weights import EPS

from fewbits.calibration import histogram
from fewbits.calibration.histogram import Histogram
from fewbits.errors import InputError
from fewbits.kernels.triton import observed


def check(x: torch.Tensor) -> None:
    statistics = observed.observe(x)
    values = x.double()
    assert statistics.low == values.min().item() and statistics.high == values.max().item()
    assert Histogram.of_counts(statistics.counts, statistics.exponent) == Histogram.of(x)
    exact = values.square().mean().item()
    # a lane adds up 32 squares, the lanes 2048 numbers in pairs; each square has two roundings more. Below 2^-126 of the reach nothing is
    # left
    reach = 2.0**statistics.exponent
    assert abs(statistics.mean_square - exact) <= (32 + 11 + 3) * EPS * exact + 2.0**-120 * reach * reach


def test_its_bins_are_those_of_the_histogram() -> None:
    assert (observed.BINS, observed.HALF) == (histogram.BINS, histogram.HALF)


@pytest.mark.parametrize("n", [1, 7, 2048, 65536, 65537, 150_001])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_all_of_it_in_one_pass(n: int, dtype: torch.dtype) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    x[n // 2 :] *= 300  # programs of different reach
    check(x.to(dtype))


def test_all_negative_and_all_positive_values_keep_their_least_and_largest() -> None:
    """A zero from outside the tensor would be the largest of the first, and the least of the second."""
    x = torch.rand(1000) + 0.5
    check(-x)
    check(x)


def test_powers_of_two_zeros_and_extremes() -> None:
    check(torch.tensor([0.0, -0.0]))
    check(torch.tensor([1.0, -1.0, 0.5, -2.0]))
    check(torch.tensor([3e38, -1e-38, 1e-42]))
    check(torch.tensor([1e-42, -1e-44]))
    check(torch.full((5,), 65504.0, dtype=torch.float16))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    x = torch.randn(3000)
    x[2500] = value
    with pytest.raises(InputError, match="1 of 3000 activations are not finite"):
        observed.observe(x)
