"""What it costs to round an input by a fixed scale: rounding, and values of other text beyond the range."""

from __future__ import annotations

import math

import pytest
import torch
from recorded import measured

from fewbits.formats.runtime.activations import Activation, quantized
from fewbits.sensitivity.prediction import activation_kl, clipping_kl, runtime_kl

COLS, ROWS = 24, 8


def drawn(outliers: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 16, COLS, generator=generator)
    x[1, 5, 3] = outliers  # a value of the second half alone
    return x, torch.randn(4, 16, ROWS, generator=generator), torch.randn(ROWS, COLS, generator=generator)


def test_clipping_is_that_of_one_half_of_the_samples_by_the_range_of_the_other() -> None:
    x, g, w = drawn(outliers=9.0)
    by_half = [x[half::2].abs().flatten(0, 1).amax(0) for half in (0, 1)]
    mean_square = g.square().mean((0, 1))
    # 64 tokens of which half are judged each time; a token's weight in the loss is the mean over its outputs of g^2
    weight = float(g.square().mean()) / float(mean_square.mean())
    assert weight == pytest.approx(1, rel=1e-5)
    expected = 0.0
    for fit, judge in ((0, 1), (1, 0)):
        beyond = (by_half[judge] - by_half[fit].max()).clamp(min=0)
        for column in range(COLS):
            expected += 0.5 * 0.5 * float((mean_square * (w[:, column] * beyond[column]).square()).sum()) / 32
    found = clipping_kl(w, measured(x, g), 9.0)
    assert found == pytest.approx(expected, rel=1e-4) and expected > 0
    # with room for it nothing is clipped: the first half reaches `most`, so the range must be 9 times 9 / most
    most = float(by_half[0].max())
    assert clipping_kl(w, measured(x, g), 9.0 * 9.0 / most * 1.001) == 0.0


def test_factors_that_fill_the_range_give_every_channel_a_limit_of_its_own() -> None:
    """Each channel's largest value is in one half, so the other half's limit is exceeded in all of them."""
    x, g, w = drawn()
    x = x / x.abs().amax((0, 1))  # as SmoothQuant leaves them
    assert clipping_kl(w, measured(x, g), 1.0) == pytest.approx(0.0, abs=1e-12)
    fitted = clipping_kl(w, measured(x, g), 1.0, fitted=True)
    assert fitted is not None and fitted > 0
    wide = clipping_kl(w, measured(x, g), 100.0, fitted=True)
    assert wide == 0.0


def test_without_gradients_nothing_is_priced() -> None:
    x, _, w = drawn()
    static = Activation("int8", static=True, range="minmax").calibrated(-9, 9)
    assert activation_kl(w, measured(x), static) is None and clipping_kl(w, measured(x), 1.0) is None


def test_a_last_block_may_be_short() -> None:
    """Its scale is that of the columns that are there."""
    x, g, w = drawn()
    padded = torch.cat([x, torch.zeros(4, 16, 8)], 2)
    whole = runtime_kl(torch.cat([w, torch.ones(ROWS, 8)], 1), measured(padded, g), 16)
    assert runtime_kl(w, measured(x, g), 16) == pytest.approx(whole, rel=1e-6)


def test_a_wider_range_has_a_coarser_step() -> None:
    narrow = Activation("int8", static=True, range="minmax").calibrated(-1.0, 1.0)
    wide = narrow.widened(2.0)
    x = torch.tensor([[1.7, 0.3]])
    assert wide.scale is not None and narrow.scale is not None and math.isclose(wide.scale, 2 * narrow.scale)
    assert quantized(x, narrow)[0, 0] == pytest.approx(1.0) and quantized(x, wide)[0, 0] == pytest.approx(1.7, abs=wide.scale / 2)
