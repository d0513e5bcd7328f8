"""Experts that no token of the calibration text was given to: rounded for what their layer reads, and named wherever it is told."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from enumerated import one_of
from mixtures import CHOSEN, NEVER, save_all

from fewbits.artifact import Artifact

UNREACHED = [NEVER.format(name) for name in ("gate_up_proj", "down_proj")]
SAID = "most of its statistics are those of all experts of its layer"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_all(tmp_path_factory)["gpt_oss"]


def numbers(value: Any) -> list[float]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] if isinstance(value, float) else [number for each in inner for number in numbers(each)]


BUDGETS = {"one format": ("--format", "int4_g32"), "a size": ("--size", "5bpw", "--formats", "int4_g32,int8_g32")}


@pytest.mark.parametrize("budget", one_of(BUDGETS))
def test_they_are_named_on_the_terminal_in_json_and_on_the_page(
    budget: str, mixture: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    out = tmp_path / "out.fewbits"
    words = ["quantize", mixture, "-o", out, *BUDGETS[budget], "--samples", 4, "--length", 32, "--tokens", 64]
    code, _, err = run(*words)
    assert code == 0
    told = next(line for line in err.replace("\n  ", " ").splitlines() if SAID in line)
    assert told.startswith("note: ") and UNREACHED[0] in told

    code, out_json, _ = run(*words, "--json")
    result = json.loads(out_json)
    (note,) = (text for text in result["notes"] if SAID in text)
    assert code == 0 and set(result["notes"][note]) >= set(UNREACHED)
    assert all(note in result["outcomes"][name]["notes"] for name in UNREACHED)
    assert result["verdict"]["passed"] and all(map(math.isfinite, numbers(result["verdict"])))

    work = tmp_path / "out.fewbits.work"
    assert json.loads((work / "results.json").read_text())["notes"] == result["notes"]
    page = (work / "report.html").read_text()
    few = len(result["notes"][note])
    assert f"{few} of {len(result['plan']['weights'])} weights: {note}" in page and all(name in page for name in UNREACHED)

    made = Artifact(out)
    assert CHOSEN.format("down_proj") not in result["notes"][note]
    made.check()  # which decodes every weight, and none to a number that is none
