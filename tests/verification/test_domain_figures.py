"""Figures by kind of text: the same as on the text of that kind alone; the worst kind is named; weights move bits to a kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from articles import write

import fewbits
from fewbits import embedded
from fewbits.planning.accuracy import Thresholds
from fewbits.verification import metrics
from fewbits.verification.metrics import MeasuredLogits

LINES = embedded.calibration_text().splitlines(keepends=True)


def code(start: int) -> str:
    """Regular lines, as unlike prose as they can be."""
    lines = (
        f"def f{i}(x, y):\n    return {i * 7 % 13} * x[{i % 5}] + y.get('k{i % 9}', {i * 3 % 11})\n\n" for i in range(start, start + 200)
    )
    return "".join(lines)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("texts")
    kinds = {"prose": "".join(LINES[:600]), "code": code(0), "prose-test": "".join(LINES[1500:1800]), "code-test": code(1000)}
    return {name: write(folder / f"{name}.txt", text) for name, text in kinds.items()}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fewbits.quantize(embedded.MODEL, tmp_path_factory.mktemp("made") / "m.gguf", format="q4_0", method="rtn", no_verify=True).path


def test_each_kind_has_the_figures_of_its_file_alone(file: Path, texts: dict[str, Path], run: Any) -> None:
    kinds = {"prose": texts["prose-test"], "code": texts["code-test"]}
    words = [word for name, path in kinds.items() for word in ("--data", f"{name}={path}")]
    code, out, _ = run("verify", file, "--against", embedded.MODEL, *words, "--length", "64,code=128", "--tokens", 1016, "--json")
    both = json.loads(out)
    assert code == 0 and [each["name"] for each in both["domains"]] == ["prose", "code"]
    assert both["tokens"] == sum(each["tokens"] for each in both["domains"]) == 8 * 63 + 4 * 127
    for each, length in zip(both["domains"], (64, 128), strict=True):
        alone = fewbits.verify(file, embedded.MODEL, data=kinds[each["name"]], length=length, tokens=508).to_dict()
        for figure in ("tokens", "kl_mean", "kl_ci95", "kl_floor", "ppl", "ppl_base", "ppl_ratio", "ppl_ratio_ci95", "top1_agreement"):
            wanted = list(alone[figure]) if isinstance(alone[figure], tuple) else alone[figure]  # type: ignore[arg-type]
            assert each[figure] == pytest.approx(wanted, rel=1e-12), figure  # sums of the same numbers
        assert alone["domains"] == () and alone["worst_domain"] is None
    worst = max(both["domains"], key=lambda each: each["kl_mean"])
    assert both["worst_domain"] == worst["name"]
    total = sum(each["kl_mean"] * each["tokens"] for each in both["domains"])
    assert both["kl_mean"] == pytest.approx(total / both["tokens"], rel=1e-12)


def test_the_terminal_names_the_worst_kind(file: Path, texts: dict[str, Path], run: Any) -> None:
    words = ("--length", 64, "--tokens", 252, "--no-floor", "--weights", "prose-test=3,code-test=1")
    data = ("--data", texts["prose-test"], "--data", texts["code-test"])
    _, _, err = run("verify", file, "--against", embedded.MODEL, *data, *words)
    rows = {line.split()[0]: line.split()[1] for line in err.splitlines() if line.startswith(("prose-test", "code-test"))}
    assert rows == {"prose-test": "189", "code-test": "63"}
    assert "by kind of text" in err and "worst on " in err


@pytest.mark.slow  # two runs of `quantize`; that weights decide which samples are drawn is tested with the samples
def test_weights_move_the_bits_to_a_kind(texts: dict[str, Path], tmp_path: Path) -> None:
    data, judged = [texts["prose"], texts["code"]], [texts["prose-test"], texts["code-test"]]
    kl: dict[str, dict[str, float]] = {}
    for favoured, weights in (("prose", {"prose": 15}), ("code", {"code": 15})):
        how: dict[str, Any] = {"format": "q3_k", "method": "gptq", "tune": 0, "samples": 16, "length": 64, "no_verify": True}
        made = fewbits.quantize(embedded.MODEL, tmp_path / "m.gguf", data=data, weights=weights, **how)
        found: Any = fewbits.verify(made.path, embedded.MODEL, data=judged, length=64, tokens=1008, no_floor=True)
        kl[favoured] = {each.name.removesuffix("-test"): each.kl_mean for each in found.domains}
    assert kl["code"]["code"] < 0.8 * kl["prose"]["code"]
    assert kl["prose"]["prose"] < 0.8 * kl["code"]["prose"]


def test_intervals_say_whether_the_worst_is_known() -> None:
    rng = np.random.default_rng(0)

    def verdict(*means: float) -> metrics.Verdict:
        kl = np.concatenate([rng.gamma(2.0, mean / 2, 640) for mean in means])
        ones = np.ones(len(kl))
        measured = MeasuredLogits(kl.tolist(), ones.tolist(), ones.tolist(), [True] * len(kl))
        windows, names = [[0] * 65] * (10 * len(means)), [name for name, _ in zip("abc", means, strict=False) for _ in range(10)]
        figures = metrics.figures_by_domain({"file": measured}, windows, names)
        about = {"nbytes": 1, "bits_per_weight": 4.0, "runtime": "r", "runtime_version": "1"}
        return metrics.judge(measured, Thresholds(), **about, domains=figures)  # type: ignore[arg-type]

    clear, unclear = verdict(0.01, 0.05, 0.02), verdict(0.05, 0.0505, 0.01)
    assert clear.worst_domain == "b" and clear.perhaps_worse == []
    assert {unclear.worst_domain, *unclear.perhaps_worse} == {"a", "b"}
    assert verdict(0.01).domains == () and verdict(0.01).worst_domain is None
