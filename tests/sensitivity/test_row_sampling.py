"""The few rows that stand for all of a weight: their sum, and how far it may be off."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fewbits.sensitivity.rows import draw


class TestDrawing:
    def test_all_rows_give_the_sum_itself(self) -> None:
        values = torch.rand(50, dtype=torch.float64)
        for count in (50, 51, 1000):
            drawn = draw(torch.rand(50), count)
            assert drawn.rows.tolist() == list(range(50))
            assert drawn.total(values) == pytest.approx(float(values.sum()), rel=1e-12) and drawn.spread(values) == 0

    def test_a_perfect_guess_needs_few_rows(self) -> None:
        guess = torch.exp(2 * torch.randn(3000, generator=torch.Generator().manual_seed(0))) + 1e-3
        drawn = draw(guess, 8)
        # every guess is raised by a thousandth of their mean: of the total that is a thousandth, and less of each large row
        assert drawn.total(guess[drawn.rows]) == pytest.approx(float(guess.sum()), rel=2e-3) and drawn.spread(guess[drawn.rows]) < 2e-3

    def test_few_of_heavy_tailed_rows_stand_for_all(self) -> None:
        """Guesses over four orders of magnitude, each wrong by a factor of about 1.6: draws by them spread by sqrt(e^.25 - 1) / sqrt(n)."""
        count, seeds, wrong = 64, 300, 0.5
        expected = math.sqrt(math.exp(wrong**2) - 1) / math.sqrt(count)
        errors, spreads = [], []
        for seed in range(seeds):
            made = torch.Generator().manual_seed(seed)
            guess = torch.exp(2 * torch.randn(2000, generator=made))
            true = guess * torch.exp(wrong * torch.randn(2000, generator=made))
            drawn = draw(guess, count)
            assert int(drawn.times.sum()) == count and len(drawn.rows) <= count
            errors.append(drawn.total(true[drawn.rows]) / float(true.double().sum()) - 1)
            spreads.append(drawn.spread(true[drawn.rows]))
        # four standard errors: of a mean over so many seeds, and of a root mean square (one part in sqrt(2 n))
        assert abs(np.mean(errors)) < 4 * expected / math.sqrt(seeds)
        assert np.sqrt(np.mean(np.square(errors))) < expected * (1 + 4 / math.sqrt(2 * seeds))
        # what it says of its own error is neither boast nor excuse; a row so large that it is drawn several times is known exactly
        assert 0.7 * np.mean(spreads) < np.sqrt(np.mean(np.square(errors))) < 1.2 * np.mean(spreads)

    def test_a_row_that_is_guessed_at_nothing_still_counts(self) -> None:
        guess = torch.zeros(3000)
        guess[:10] = 1.0  # each of the others is drawn by a thousandth of the mean: together as often as one of 1,000
        drawn = draw(guess, 2000)
        assert drawn.rows.max() >= 10
        # of a sum that is all theirs, two draws of 2,000 speak: known to a factor of two
        assert 0.5 * 2990 < drawn.total((drawn.rows >= 10).double()) < 2 * 2990
