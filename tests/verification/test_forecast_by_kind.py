"""The forecast by kind of text: measured as the whole model would be, kept in table, plan and results, and near to what is measured."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from articles import write
from transformers import AutoModelForCausalLM

import fewbits
from fewbits import calibration, embedded, planning, sensitivity, targets
from fewbits import formats as known_formats
from fewbits.calibration.folder import Statistics
from fewbits.calibration.split import Text, split
from fewbits.errors import InputError
from fewbits.model import Model
from fewbits.planning.accuracy import Thresholds
from fewbits.planning.allocation import allocator
from fewbits.progress import silent
from fewbits.reporting import schema
from fewbits.reporting.page import checked_json
from fewbits.verification import metrics
from fewbits.verification.forecast import by_kind
from fewbits.verification.metrics import MeasuredLogits

GGUF = targets.get("gguf")
LINES = embedded.calibration_text().splitlines(keepends=True)


@pytest.fixture(scope="module")
def statistics(embedded_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Statistics:
    folder = tmp_path_factory.mktemp("calibrated") / "statistics"
    return calibration.collect(embedded_model, calibration.draw(embedded_model, (), 8, 128, 0), folder, progress=silent)


@pytest.fixture(scope="module")
def table(embedded_model: Model, statistics: Statistics) -> sensitivity.Sensitivity:
    return sensitivity.measure(embedded_model, statistics, [known_formats.get(name) for name in ("q4_0", "q8_0")], "auto")


def windows_of(model: Model, length: int, count: int, seed: int) -> list[list[int]]:
    return [list(ids) for ids in calibration.draw(model, (), count, length, seed).ids]


@pytest.mark.parametrize("feedback", [True, False])
def test_factors_are_those_of_the_whole_model(feedback: bool, embedded_model: Model, statistics: Statistics) -> None:
    plan = planning.uniform(embedded_model.weights, GGUF, known_formats.get("q4_0"))
    fed_back = {weight.name for weight in embedded_model.weights} if feedback else set()
    samples = windows_of(embedded_model, 96, 3, 1)
    kinds = {"long": windows_of(embedded_model, 128, 3, 2), "short": [list(reversed(w)) for w in windows_of(embedded_model, 40, 5, 3)]}
    found = by_kind.measure_kinds(embedded_model, statistics, plan, fed_back, samples, kinds, 1 << 30, silent)

    damaged = {
        weight.name: by_kind.damaged(embedded_model, statistics, "q4_0", weight, weight.name in fed_back)
        for weight in embedded_model.weights
    }
    module = AutoModelForCausalLM.from_pretrained(embedded.MODEL, dtype=torch.float32)
    measured: dict[str, MeasuredLogits] = {}
    every = {"": samples, **kinds}
    with torch.no_grad():
        before = {(name, i): module(torch.tensor([w])).logits[0, :-1] for name, each in every.items() for i, w in enumerate(each)}
        for weight in embedded_model.weights:
            module.get_parameter(weight.parameter).copy_(damaged[weight.name])
        for name, each in every.items():
            for i, window in enumerate(each):
                logits = module(torch.tensor([window])).logits[0, :-1]
                measured.setdefault(name, MeasuredLogits()).add(before[name, i], logits, torch.tensor(window[1:]))
    kl = {name: float(np.mean(part.kl)) for name, part in measured.items()}
    assert found.keys() == {"long", "short"}
    for name, factor in found.items():
        assert factor == pytest.approx(kl[name] / kl[""], rel=6e-3)  # it has three digits, so that half of the last is up to 0.5 %
    assert found["short"] > 1.3 * found["long"]  # text backwards: else windows could be taken for those of another kind


def test_windows_are_taken_at_equal_distances() -> None:
    windows = [[i] * 512 for i in range(100)]
    assert [w[0] for w in by_kind.some(windows, 4096)] == [0, 12, 25, 37, 50, 62, 75, 87]
    assert [w[0] for w in by_kind.some(windows[:3], 4096)] == [0, 1, 2]
    assert len(by_kind.some([[0] * 4096] * 9, 4096)) == 2  # one long document would say little of the next


@pytest.mark.parametrize(("judged", "held_out", "worth"), [
    ([], False, False), (["a", "a"], False, False), (["a", "a"], True, True), (["a", "b"], False, True),
])  # fmt: skip
def test_it_is_made_where_other_text_is_judged(judged: list[str], held_out: bool, worth: bool) -> None:
    assert by_kind.worth_asking(judged, held_out) is worth


class TestPlans:
    def plan(self, table: sensitivity.Sensitivity) -> planning.Plan:
        some = allocator(replace(table, kinds={"prose": 1.25, "code": 2.0, "b": 1.25}), GGUF)
        return some.within_bytes(some.least_bytes * 5 // 4, "")

    def test_a_plan_costs_its_factor_on_each_kind_and_the_worst_comes_first(self, table: sensitivity.Sensitivity) -> None:
        plan = self.plan(table)
        assert plan.kl and [(kind.name, kind.kl / plan.kl) for kind in plan.kinds] == [("code", 2.0), ("b", 1.25), ("prose", 1.25)]
        assert plan.kinds_text().startswith(f"code {plan.kinds[0].kl:.2g} (worst), b ") and plan.kinds_text() in str(plan)

    def test_it_stays_in_plan_json_until_the_plan_is_edited(self, table: sensitivity.Sensitivity) -> None:
        plan = self.plan(table)
        text = plan.to_json()
        assert json.loads(text)["predicted_kl_by_kind"].keys() == {"code", "b", "prose"}
        again = planning.read(text, table.weights, GGUF)
        assert again.to_json() == text and [kind.name for kind in again.kinds] == ["code", "b", "prose"]
        edited = json.loads(text)
        row = next(row for row in edited["weights"].values() if row["format"] == "q4_0")
        row["format"] = "q5_0"
        assert planning.read(json.dumps(edited), table.weights, GGUF).kinds == ()
        for wrong in (["code"], {"code": "x"}, {"code": None}, {"code": 1e999}):
            with pytest.raises(InputError, match="not a plan"):
                planning.read(json.dumps(json.loads(text) | {"predicted_kl_by_kind": wrong}), table.weights, GGUF)

    def test_a_table_keeps_its_factors_and_takes_none_that_is_none(self, table: sensitivity.Sensitivity, tmp_path: Path) -> None:
        replace(table, kinds={"code": 2.0}).save(tmp_path / "table.json")
        assert sensitivity.read(tmp_path / "table.json").kinds == {"code": 2.0}
        for wrong in (0.0, -1.0, float("inf")):
            replace(table, kinds={"code": wrong}).save(tmp_path / "table.json")
            with pytest.raises(InputError, match="no table of sensitivities"):
                sensitivity.read(tmp_path / "table.json")


def test_the_forecast_beside_a_verdict_counts_kinds_as_they_were_judged() -> None:
    kinds = {"prose": 0.01, "code": 0.04}
    judged = metrics.judge(measured(300, 100), Thresholds(), **FILE, domains=figures({"prose": 300, "code": 100}))
    plain = metrics.judge(measured(400), Thresholds(), **FILE)
    for predicted in (schema.predicted_as_judged(0.02, kinds, judged), schema.Plan(1, 4.0, {}, 0.02, kinds).predicted_for(judged)):
        assert predicted == pytest.approx(0.0175)
    assert schema.predicted_as_judged(0.02, kinds, None) == schema.predicted_as_judged(0.02, {}, plain) == 0.02
    assert schema.predicted_as_judged(0.02, {"code": 0.04}, plain) == 0.04  # of one kind alone
    assert schema.predicted_as_judged(0.02, {"code": 0.04}, judged) == 0.02  # of the other nothing is known


FILE: dict[str, Any] = {"nbytes": 1, "bits_per_weight": 4.0, "runtime": "torch", "runtime_version": "0"}


def measured(*counts: int) -> MeasuredLogits:
    count = sum(counts)
    return MeasuredLogits([0.1] * count, [1.0] * count, [1.0] * count, [True] * count)


def figures(tokens: dict[str, int]) -> list[metrics.DomainFigures]:
    windows = [[0] * (count + 1) for count in tokens.values()]
    return metrics.figures_by_domain({"file": measured(*tokens.values())}, windows, list(tokens))


def test_the_first_plan_for_an_accuracy_is_aimed_at_the_text_that_is_judged(table: sensitivity.Sensitivity) -> None:
    from fewbits.artifact.accuracy_loop import _factor

    table = replace(table, kinds={"prose": 1.0, "code": 2.0})
    assert _factor(table, ["prose", "code", "code", "code"]) == 1.75
    assert _factor(table, []) == _factor(table, ["other"]) == 1.0


def test_fewer_windows_leave_no_kind_out() -> None:
    text = Text(None, [[i] for i in range(13)], ["a"] * 8 + ["b"] * 4 + ["c"])
    some = text.fewer(0.5)
    assert Counter(some.domains) == {"a": 4, "b": 2, "c": 1}
    assert some.windows == [[0], [1], [2], [3], [8], [9], [12]]
    assert Text(None, [[i] for i in range(8)]).fewer(0.25).windows == [[0], [1]]


def test_as_much_is_set_aside_as_was_asked_for(embedded_model: Model, tmp_path: Path) -> None:
    path = write(tmp_path / "text.txt", "".join(LINES[:1500]))
    text = split(embedded_model, [path], (), 8, 64, 0, 63 * 24)
    assert text.samples and len(text.samples.ids) == 8 and len(text.windows) == 24
    assert not {tuple(window) for window in text.windows} & set(text.samples.ids)
    short = split(embedded_model, [write(tmp_path / "short.txt", "".join(LINES[:40]))], (), 500, 64, 0, 63 * 24)
    assert short.samples and len(short.windows) == (len(short.samples.ids) + len(short.windows)) // 4


@pytest.mark.slow
def test_quantize_foretells_each_kind(tmp_path: Path, run: Any) -> None:
    """Within a factor of 1.25, and nearer than the sum of the plan alone."""
    code = "".join(f"def f{i}(x, y):\n    return {i * 7 % 13} * x[{i % 5}] + y.get('k{i % 9}', {i * 3 % 11})\n\n" for i in range(900))
    held = {"prose": write(tmp_path / "p.txt", "".join(LINES[2000:3200])), "code": write(tmp_path / "c.txt", code)}
    data = write(tmp_path / "data.txt", "".join(LINES[:2000]))
    words = [word for name, path in held.items() for word in ("--held-out", f"{name}={path}")]
    how = ("--size", "4.5bpw", "--data", data, "--samples", 32, "--length", 256, "--tokens", 8160, "--formats", "q3_k,q4_k,q5_k,q6_k")
    status, _, err = run("quantize", embedded.MODEL, "-o", tmp_path / "m.gguf", *how, *words, "--answers", 0)
    assert status == 0 and "forecasting" in err and "by kind of text: " in err and "(worst)" in err and "predicted" in err
    work = tmp_path / "m.gguf.work"
    results = json.loads((work / "results.json").read_text())
    foretold = results["plan"]["predicted_kl_by_kind"]
    assert list(foretold) == sorted(foretold, key=lambda name: -foretold[name]) and foretold.keys() == held.keys()
    plain = results["plan"]["predicted_kl"]
    off = dict.fromkeys(("by kind", "plan"), 0.0)
    for each in results["verdict"]["domains"]:
        assert 1 / 1.25 < each["kl_mean"] / foretold[each["name"]] < 1.25
        off["by kind"] += abs(math.log(each["kl_mean"] / foretold[each["name"]]))
        off["plan"] += abs(math.log(each["kl_mean"] / plain))
    assert off["by kind"] < off["plan"]
    read = checked_json.read(schema.Plan, results["plan"])
    assert read.predicted_kl_by_kind == foretold
    assert 'class="number">KL predicted' in (work / "report.html").read_text()
    before = (tmp_path / "m.gguf").read_bytes()
    again = fewbits.quantize(  # the factors come from the work folder
        embedded.MODEL, tmp_path / "m.gguf", size="4.5bpw", data=data, samples=32, length=256, tokens=8160, formats="q3_k,q4_k,q5_k,q6_k",
        held_out=[f"{name}={path}" for name, path in held.items()], answers=0,
    )  # fmt: skip
    assert (tmp_path / "m.gguf").read_bytes() == before
    assert {kind.name: planning._digits(kind.kl) for kind in again.plan.kinds} == foretold
