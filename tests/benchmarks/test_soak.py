"""The soak in short, and that it sees what it is there to see."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import soak

FAST: Mapping[str, Any] = {"format": "q4_0", "method": "rtn", "tokens": 64, "length": 32}
GROWTH = 1 << 20  # in three rounds the allocator's own noise is some 100 kB; the smallest that is worth finding, a lost embedding, 2 MB


@pytest.mark.slow
def test_three_rounds_alone_and_three_in_each_of_two_processes(tmp_path: Path) -> None:
    found = soak.together(tmp_path / "together", 2, 2, settings=FAST, warm_up=1, growth=GROWTH)
    found.append(soak.soak(tmp_path / "alone", 2, settings=FAST, warm_up=1, growth=GROWTH))
    assert [each.faults for each in found] == [(), (), ()]
    assert not list(tmp_path.rglob("*.gguf"))


def test_what_grows_and_what_is_left_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[Any] = []

    def leaks(out: Path, settings: Mapping[str, Any]) -> None:  # noqa: ARG001
        out.mkdir(exist_ok=True)
        lost.append(torch.ones(1024, 512))
        lost.append((out / "m.gguf").open("w"))
        (out / ".m.gguf.1.partial").touch()
        if len(lost) > 2:  # after the warm-up
            (Path(tempfile.gettempdir()) / "float").touch()

    monkeypatch.setattr(soak, "one_round", leaks)
    found = soak.soak(tmp_path / "alone", 4, growth=GROWTH, warm_up=1)
    for file in lost[1::2]:
        file.close()
    said = ", ".join(found.faults)
    assert all(word in said for word in ("memory grows", "open files grow", "`tmp/float` is left", "`out/.m.gguf.1.partial` is left"))
    assert found.growth == pytest.approx(1024 * 512 * 4, rel=0.1)
    assert Path(tempfile.gettempdir()).exists()


@pytest.mark.parametrize(("values", "expected"), [([5, 5, 5, 5], 0), ([0, 3, 6, 9], 3), ([0, 900, 0, 0, 0, 0], 0)])
def test_the_slope_is_a_line_s_and_a_jump_is_none(values: list[int], expected: float) -> None:
    assert soak.slope(values) == expected
