"""A few answers of file and source side by side: each by its own runtime, cut short by time, left out where the source does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from greedy import recomputed

import fewbits
from fewbits import embedded, model
from fewbits.calibration import split
from fewbits.devices import host
from fewbits.errors import MissingError
from fewbits.verification import answers, runtimes
from fewbits.verification.runtimes.torch import of_module


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "m.gguf"
    fewbits.quantize(embedded.MODEL, path, format="iq2_xs", method="rtn", tokens=512, length=128, samples=4, tune=0)
    return path


def test_quantize_keeps_what_both_models_say(made: Path, embedded_model: model.Model) -> None:
    told = json.loads((made.parent / "m.gguf.work" / "results.json").read_text())
    assert len(told["answers"]) == answers.COUNT
    windows = split.held_out_windows(embedded_model, (), 128, 512)
    prompt = list(windows[0][: answers.PROMPT])
    tokenizer = embedded_model.tokenizer
    sessions = of_module(embedded_model.module()), runtimes.get("llama.cpp").open(made, answers.PROMPT + answers.NEW)
    first, (by_float, by_file) = told["answers"][0], (recomputed(session, prompt, answers.NEW) for session in sessions)
    assert first["prompt"] == tokenizer.decode(prompt, skip_special_tokens=True)
    assert tokenizer.decode(by_float, skip_special_tokens=True).startswith(first["source"][:60])
    assert tokenizer.decode(by_file, skip_special_tokens=True).startswith(first["file"][:60])
    assert first["source"] != first["file"], "two bits are few"
    apart = next(place for place, (one, two) in enumerate(zip(by_float, by_file, strict=True)) if one != two)
    assert first["same_tokens"] == apart
    assert "In its own words" in (made.parent / "m.gguf.work" / "report.html").read_text()


def test_an_answer_ends_where_the_time_does(made: Path, embedded_model: model.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_SECONDS", 0.0)
    windows = split.held_out_windows(embedded_model, (), 128, 512)
    (one,) = answers.answers(made, embedded_model, windows, runtimes.get("llama.cpp"), 1)
    assert one.same_tokens <= 1 and len(embedded_model.tokenizer(one.source).input_ids) <= 3


def test_a_source_that_does_not_fit_is_said(made: Path, embedded_model: model.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "free_memory", lambda: 1_000_000)
    with pytest.raises(MissingError, match="are free"):
        answers.answers(made, embedded_model, [[1, 2, 3]], runtimes.get("llama.cpp"))


def test_none_are_made_where_none_are_wanted(tmp_path: Path) -> None:
    result = fewbits.quantize(embedded.MODEL, tmp_path / "m.gguf", format="q8_0", method="rtn", tokens=64, length=64, answers=0)
    assert result.gathered is not None and result.gathered.answers == () and "answers" not in result.gathered.left_out
