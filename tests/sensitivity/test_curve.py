"""Measured over predicted KL of whole models: the curve itself, what it changes in plans, and how it is measured."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

from fewbits import calibration, planning, sensitivity, targets
from fewbits import formats as known
from fewbits.calibration.folder import Statistics
from fewbits.model import Model
from fewbits.planning.allocation import Allocator, allocator
from fewbits.progress import silent
from fewbits.sensitivity.curve import Curve, through
from fewbits.verification.forecast.large_damage import measure_curve

RISING = through([(0.1, 0.12), (0.4, 0.6)])


@pytest.fixture(scope="module")
def statistics(embedded_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Statistics:
    folder = tmp_path_factory.mktemp("calibrated") / "statistics"
    samples = calibration.draw(embedded_model, (), 12, 128, 0)
    return calibration.collect(embedded_model, samples, folder, progress=silent)


@pytest.fixture(scope="module")
def whole(embedded_model: Model, statistics: Statistics) -> Allocator:
    wanted = [known.get(name) for name in ("iq2_xs", "q4_k", "q8_0")]
    return allocator(sensitivity.measure(embedded_model, statistics, wanted, "rtn"), targets.get("gguf"))


class TestCurve:
    def test_it_goes_through_its_points(self) -> None:
        assert [RISING.measured(p) for p, _ in RISING.points] == pytest.approx([m for _, m in RISING.points])

    def test_small_damage_is_left_alone(self) -> None:
        assert RISING.measured(0.009) == 0.009 and Curve().measured(3.0) == 3.0

    @pytest.mark.parametrize("curve", [RISING, through([(0.1, 0.09), (1.0, 0.2)]), through([(0.5, 0.5)]), Curve()])
    def test_it_never_falls_and_is_undone(self, curve: Curve) -> None:
        places = [10 ** (k / 8) for k in range(-32, 9)]
        measured = [curve.measured(p) for p in places]
        assert all(b >= a for a, b in itertools.pairwise(measured))
        assert [curve.measured(curve.predicted(m)) for m in measured] == pytest.approx(measured, rel=1e-6)

    def test_points_that_say_nothing_are_left_out(self) -> None:
        assert through([(0.0, 0.1), (0.2, math.nan), (0.3, 0.0), (0.2, 0.1)]).points == ((0.2, 0.1),)


class TestPlans:
    def test_the_plan_of_a_size_stays_and_says_what_will_be_measured(self, whole: Allocator) -> None:
        size = whole.least_bytes * 5 // 4
        plain = whole.within_bytes(size, "")
        assert plain.kl
        curve = through([(plain.kl / 2, plain.kl * 0.6), (plain.kl * 2, plain.kl * 2.6)])
        corrected = replace(whole, table=replace(whole.table, curve=curve)).within_bytes(size, "")
        assert [e.format for e in corrected.entries] == [e.format for e in plain.entries]
        assert corrected.kl == pytest.approx(curve.measured(plain.kl)) and corrected.kl > plain.kl * 1.1

    def test_an_accuracy_is_met_as_measured(self, whole: Allocator) -> None:
        middle = whole.within_bytes(whole.least_bytes * 5 // 4, "").kl
        assert middle
        bent = replace(whole, table=replace(whole.table, curve=through([(middle / 4, middle / 2), (middle, 2 * middle)])))
        plain, corrected = whole.within_kl(middle, ""), bent.within_kl(middle, "")
        assert corrected.kl is not None and corrected.kl <= middle < 2 * corrected.kl
        assert corrected.nbytes > plain.nbytes  # half as much is left for the sum

    def test_a_table_keeps_its_curve(self, whole: Allocator, tmp_path: Path) -> None:
        table = replace(whole.table, curve=RISING)
        table.save(tmp_path / "table.json")
        assert sensitivity.read(tmp_path / "table.json").curve == RISING


def test_the_curve_is_what_the_damaged_model_measures(embedded_model: Model, statistics: Statistics, whole: Allocator) -> None:
    """The strongest damage is the plan rounded to nearest, whose prediction is the sum over the table's cells; or, where scales will be
    tuned, what the weakest lets expect."""
    plan = planning.uniform(embedded_model.weights, targets.get("gguf"), known.get("iq2_xs"))
    samples = calibration.draw(embedded_model, (), 4, 128, 1).ids
    curve, tuned = (measure_curve(embedded_model, statistics, plan, samples, 1 << 30, silent, tuned) for tuned in (False, True))
    assert len(curve.points) == len(tuned.points) == 3
    predicted, measured = zip(*curve.points, strict=True)
    assert [p / predicted[-1] for p in predicted] == pytest.approx([0.16, 0.49, 1.0])  # strengths squared
    cells = sum(whole.table.rows[weight.name]["iq2_xs"].kl for weight in embedded_model.weights)
    spread = sum((c := whole.table.rows[w.name]["iq2_xs"]).spread * c.kl for w in embedded_model.weights)
    assert abs(predicted[-1] - cells) < 3 * spread + 0.02 * cells
    assert all(0.5 < m / p < 2 for p, m in curve.points) and measured[0] < measured[1] < measured[2]
    expected, found = zip(*tuned.points, strict=True)
    assert found == measured and expected[0] == pytest.approx(measured[0])
    assert [p / expected[-1] for p in expected] == pytest.approx([0.16, 0.49, 1.0])
