from __future__ import annotations

import math

import numpy as np
import pytest
import slow
import torch
from torch import Tensor

from fewbits.calibration.text import windows
from fewbits.errors import InputError
from fewbits.planning.accuracy import Thresholds
from fewbits.progress import silent
from fewbits.verification import metrics
from fewbits.verification.metrics import MeasuredLogits
from fewbits.verification.session import Session


class Fixed(Session):
    """Logits by a formula of position and token: a runtime that can be computed by hand."""

    def __init__(self, shift: float = 0.0, vocabulary: int = 11) -> None:
        self.shift, self.vocabulary = shift, vocabulary

    def logits(self, tokens: list[int]) -> Tensor:
        base = torch.arange(self.vocabulary) * 0.3 + torch.tensor(tokens)[:, None] * 0.1
        return base + self.shift * torch.sin(torch.arange(self.vocabulary) + torch.tensor(tokens)[:, None].float())


WINDOWS = [[1, 4, 2, 8, 5], [7, 3, 3, 9, 0]]


def measured(shift: float) -> MeasuredLogits:
    return metrics.compare_logits(Fixed(), {"test": Fixed(shift)}, WINDOWS, silent)["test"]


def verdict(m: MeasuredLogits, thresholds: Thresholds = Thresholds()) -> metrics.Verdict:
    return metrics.judge(m, thresholds, nbytes=1, bits_per_weight=1.0, runtime="r", runtime_version="1")


def test_kl_and_perplexity_equal_the_slow_twin() -> None:
    m = measured(0.7)
    kls, nlls = [], []
    for window in WINDOWS:
        base, test = Fixed().logits(window), Fixed(0.7).logits(window)
        for i in range(len(window) - 1):
            kls.append(slow.kl(base[i].tolist(), test[i].tolist()))
            nlls.append(-math.log(math.exp(test[i, window[i + 1]]) / sum(math.exp(x) for x in test[i])))
    assert m.kl == pytest.approx(kls, rel=1e-5)
    assert verdict(m).ppl == pytest.approx(math.exp(sum(nlls) / len(nlls)), rel=1e-5)
    assert verdict(m).tokens == sum(len(w) - 1 for w in WINDOWS)


def test_a_model_is_at_no_distance_from_itself() -> None:
    v = verdict(measured(0.0), Thresholds(max_kl=0.0, min_agreement=1.0, max_ppl_ratio=1.0))
    assert (v.kl_mean, v.ppl_ratio, v.top1_agreement, v.max_logit_diff) == (0.0, 1.0, 1.0, 0.0)
    assert v.passed


@pytest.mark.parametrize("limit", [Thresholds(max_kl=1e-4), Thresholds(min_agreement=0.9999), Thresholds(max_ppl_ratio=0.5)])
def test_each_threshold_can_fail_a_verdict(limit: Thresholds) -> None:
    assert verdict(measured(1.5)).passed
    failed = verdict(measured(1.5), limit)
    assert not failed.passed and len(failed.failures) == 1


def test_a_nan_never_passes() -> None:
    class Broken(Fixed):
        def logits(self, tokens: list[int]) -> Tensor:
            return super().logits(tokens) * math.nan

    m = metrics.compare_logits(Fixed(), {"test": Broken()}, WINDOWS, silent)["test"]
    assert not verdict(m).passed
    assert not verdict(m, Thresholds(max_kl=1e9)).passed


def test_the_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        level = np.repeat(rng.exponential(1.0, 64), 64)  # errors alike within a block, as in a text
        low, high = metrics.bootstrap_ci95(level * rng.exponential(1.0, len(level)))
        hits += low <= 1.0 <= high
    assert 0.88 <= hits / 200 <= 0.98  # 95 % minus what 64 blocks cannot know; three standard errors are 5 %


def test_windows_start_with_the_beginning_token_and_do_not_overlap(embedded_model) -> None:
    tokenizer = embedded_model.tokenizer
    text = "The quick brown fox. " * 300
    cut = windows.windows(text, tokenizer, 64)
    assert all(w[0] == tokenizer.bos_token_id and len(w) == 64 for w in cut)
    joined = [token for w in cut for token in w[1:]]
    assert joined == tokenizer(text, add_special_tokens=False).input_ids[: len(joined)]
    assert len(windows.windows(text, tokenizer, 64, tokens=200)) == 3


def test_too_little_text_is_refused_with_both_numbers(embedded_model) -> None:
    with pytest.raises(InputError, match=r"the text has \d+ tokens, one window needs 511"):
        windows.windows("Too short.", embedded_model.tokenizer, 512)
