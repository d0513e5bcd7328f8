"""Budgets of few bits: which formats are measured for them, and when scales are tuned by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fewbits import embedded, pipeline, targets
from fewbits.model import Model
from fewbits.planning import uniform
from fewbits.planning.accuracy import Thresholds
from fewbits.planning.constraints import UNCONSTRAINED, Constraints
from fewbits.planning.decision import Budget
from fewbits.request import USUAL_STEPS, Request
from fewbits.targets import pricing

GGUF = targets.get("gguf")


def measured(source: Model, budget: Budget, constraints: Constraints = UNCONSTRAINED) -> set[str]:
    return {fmt.name for fmt in pricing.worth_measuring(source, GGUF, budget, constraints)}


class TestWhatIsMeasured:
    @pytest.mark.parametrize("size", ["2.5bpw", "iq2_m", "3.9bpw"])
    def test_small_sizes_take_every_candidate(self, size: str, embedded_model: Model) -> None:
        assert measured(embedded_model, Budget(size=size)) == set(GGUF.candidates)

    @pytest.mark.parametrize("budget", [Budget(size="4.5bpw"), Budget(size="q4_k_m"), Budget(limits=Thresholds(max_kl=0.01))])
    def test_others_do_without_the_smallest(self, budget: Budget, embedded_model: Model) -> None:
        assert set(GGUF.candidates) - measured(embedded_model, budget) == {"iq1_s", "iq1_m", "iq2_xxs", "iq2_xs"}

    def test_what_was_named_is_measured(self, embedded_model: Model) -> None:
        named = Constraints(overrides=("layers.0=iq2_xxs",))
        assert "iq2_xxs" in measured(embedded_model, Budget(size="4.5bpw"), named)
        assert measured(embedded_model, Budget(size="4.5bpw"), Constraints(formats=("iq1_s", "q8_0"))) == {"iq1_s", "q8_0"}


class TestTuning:
    def steps(self, source: Model, plan: Any = None, **options: Any) -> int | None:
        request = Request(model=embedded.MODEL, out="out.gguf", **options)
        return request.with_tuning(source, plan).tune

    def test_it_is_the_default_below_four_bits(self, embedded_model: Model) -> None:
        assert self.steps(embedded_model, size="2.5bpw") == USUAL_STEPS
        assert self.steps(embedded_model, size="4.5bpw") == 0
        assert self.steps(embedded_model, max_kl=0.3) == USUAL_STEPS
        assert self.steps(embedded_model, max_kl=0.01) == 0

    @pytest.mark.parametrize(("fmt", "steps"), [("iq2_xs", USUAL_STEPS), ("q4_k", 0)])
    def test_one_format_for_all_counts_too(self, fmt: str, steps: int, embedded_model: Model) -> None:
        from fewbits import formats

        plan = uniform(embedded_model.weights, GGUF, formats.get(fmt), method="auto")
        assert self.steps(embedded_model, plan, format=fmt) == steps

    @pytest.mark.parametrize("option", [{"tune": 0}, {"method": "rtn"}, {"stats": "somewhere"}, {"executor": "local:2"}])
    def test_not_where_it_was_declined_or_cannot_be(self, option: dict[str, Any], embedded_model: Model) -> None:
        assert self.steps(embedded_model, size="2.5bpw", **option) == 0


def test_a_plan_of_few_bits_lands_where_it_was_predicted(tmp_path: Path) -> None:
    """Through the whole pipeline: planned with codebooks, tuned, corrected by the curve, and run in llama.cpp."""
    options: dict[str, Any] = {"samples": 24, "length": 128, "tokens": 4096, "formats": ("iq1_s", "iq2_xs", "iq3_s", "q4_k"), "tune": 20}
    made = pipeline.quantize(embedded.MODEL, tmp_path / "small.gguf", size="2.1bpw", **options)
    assert made.decision is not None and made.decision.allocator.table.curve.points
    assert {"iq1_s", "iq2_xs"} <= {entry.format for entry in made.plan.entries}
    assert made.plan.bits_per_weight <= 2.1
    assert made.plan.kl is not None and 0.8 < made.verdict.kl_mean / made.plan.kl < 1.25


def test_a_large_damage_that_is_allowed_is_met_and_used(tmp_path: Path) -> None:
    """By plain rounding, with which the embedded model needs fewer than two bits for it."""
    options: dict[str, Any] = {
        "samples": 16,
        "length": 128,
        "tokens": 4096,
        "method": "rtn",
        "formats": ("iq1_s", "iq2_xxs", "iq2_xs", "iq3_xxs"),
    }
    made = pipeline.quantize(embedded.MODEL, tmp_path / "small.gguf", max_kl=0.3, **options)
    assert 0.24 < made.verdict.kl_mean <= 0.3 and made.plan.bits_per_weight < 2
