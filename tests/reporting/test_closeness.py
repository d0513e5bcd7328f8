"""A word and a colour for how close a file is, by the steps of docs/reading-a-report.md, whether limits were set or not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import made_results
import pytest

import fewbits
from fewbits.planning.accuracy import Thresholds
from fewbits.reporting.closeness import closeness
from fewbits.reporting.terminal import console, verdicts
from fewbits.verification.metrics import Verdict


def verdict(agreement: float, ratio: float, low: float | None = None, limits: Thresholds | None = None) -> Verdict:
    return Verdict(
        tokens=1000, kl_mean=0.7, kl_ci95=(0.6, 0.8), kl_p99=3.0, kl_max=9.0, kl_floor=None, ppl=20.7, ppl_base=10.0, ppl_ratio=ratio,
        ppl_ratio_ci95=(ratio - 0.01 if low is None else low, ratio + 0.01), top1_agreement=agreement, max_logit_diff=9.0, bytes=1000,
        bits_per_weight=2.0, runtime="llama.cpp", runtime_version="1", thresholds=limits or Thresholds(), failures=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("agreement", "ratio", "look"),
    [(0.98, 1.011, "close"), (0.98, 1.03, "near"), (0.95, 1.011, "near"), (0.89, 1.011, "far"), (0.95, 1.1, "far"), (0.61, 2.07, "broken"),
     (0.98, 1.3, "broken"), (0.79, 1.0, "broken")],
)  # fmt: skip
def test_the_worse_of_two_figures_decides(agreement: float, ratio: float, look: str) -> None:
    found = closeness(verdict(agreement, ratio))
    assert found is not None and found.look == look


def test_a_perplexity_that_may_be_chance_does_not_count() -> None:
    found = closeness(verdict(0.98, 1.3, low=0.9))
    assert found is not None and found.look == "close"


def test_figures_that_are_no_numbers_have_no_word() -> None:
    assert closeness(verdict(0.98, float("nan"))) is None and closeness(verdict(0.98, float("inf"))) is None


def test_a_damaged_file_is_not_green_on_the_screen_even_if_it_passed() -> None:
    with console.capture() as shown:
        verdicts.show(verdict(0.61, 2.07, limits=Thresholds(max_kl=5)))
    assert "passed" in shown.get() and "damaged: expect worse answers" in shown.get()
    assert verdicts._COLOURS["broken"] == "red"


def test_a_damaged_file_is_red_on_the_page(tmp_path: Path) -> None:
    results = made_results.results(Thresholds())
    results["verdict"] |= {"top1_agreement": 0.61, "ppl_ratio": 2.07, "ppl_ratio_ci95": [2.0, 2.1]}
    (tmp_path / "results.json").write_text(json.dumps(results))
    page = fewbits.report(tmp_path, tmp_path / "report.html").read_text()
    state = re.search(r'id="verdict".*?</p>|<p[^>]*id="verdict".*?</p>', page, re.DOTALL)
    assert state and 'class="chip broken"' in state[0] and "chip passed" not in state[0] and "Ran" not in state[0]
    assert re.search(r"\.chip\.broken\s*\{ color: var\(--bad\)", page)


def test_the_steps_are_those_of_the_documentation() -> None:
    from fewbits.reporting.closeness import _STEPS

    text = (Path(__file__).parents[2] / "docs" / "reading-a-report.md").read_text()
    for step in _STEPS:
        assert step.closeness.word in text and f"{100 * step.agreement:.0f}" in text and f"{100 * (step.ppl_ratio - 1):.0f} %" in text
