"""What a person is told meanwhile: lines where there is no terminal, a bar of the whole where there is one, and how long it will take."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from fewbits import embedded
from fewbits.preflight import Preflight, Step, Work
from fewbits.preflight.steps import _MEASURED
from fewbits.progress import Part, doing, expect, say
from fewbits.reporting.meanwhile import steps
from fewbits.reporting.meanwhile.log import InLog
from fewbits.reporting.meanwhile.terminal import OnTerminal
from fewbits.reporting.meanwhile.whole import Whole

SOURCE = Path(__file__).parents[2] / "src" / "fewbits"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_is_left_follows_the_speed_from_the_first_item_on() -> None:
    clock = Clock()
    whole = Whole(clock)
    whole.expect([Part("one", 10, 100.0), Part("two", 5, 50.0)])
    assert whole.left() == 150 and whole.share() == 0
    one = whole.begin("one", 10)
    clock.now, one.done = 20.0, 1  # twice as long as forecast
    assert whole.left() == pytest.approx(9 * 20 + 2 * 50) and whole.correction == pytest.approx(2)
    clock.now, one.done = 200.0, 10
    whole.end(one)
    assert whole.left() == pytest.approx(100) and whole.share() == pytest.approx(2 / 3)
    two = whole.begin("two", 5)
    clock.now, two.done = 205.0, 1  # and this one half as long
    assert whole.left() == pytest.approx(4 * 5)


def test_what_an_earlier_run_did_is_not_counted() -> None:
    clock = Clock()
    whole = Whole(clock)
    whole.expect([Part("one", 10, 100.0), Part("two", 10, 100.0), Part("three", 0, 50.0)])
    whole.begin("two", 4)  # nothing was left of the first, and four of ten of the second
    assert whole.left() == pytest.approx(40 + 50)


def test_what_is_found_and_not_done_says_nothing_of_the_speed() -> None:
    clock = Clock()
    whole = Whole(clock)
    whole.expect([Part("quantizing", 10, 100.0)])
    running = whole.begin("quantizing", 10)
    for _ in range(6):
        clock.now += 0.001
        running.advance(clock.now)
    assert whole.left() == pytest.approx(40, rel=0.01)
    clock.now += 20
    running.advance(clock.now)
    assert whole.left() == pytest.approx(3 * 20, rel=0.01) and whole.correction == pytest.approx(2, rel=0.01)


def test_the_estimate_subtracts_what_lies_in_the_work_folder() -> None:
    done = steps.done_before({"row": 15, "weight": 0, "input": 5, "gradient": 0}, 30, 4)
    assert done == {"calibrating": 0.5, "measuring": 0.5, "quantizing": 0.0}
    ahead = Preflight((Step("calibrating", 1, 1, 200.0), Step("measuring", 1, 1, 100.0)), ".", None, None)
    assert "about 5 min" in ahead.line() and "earlier" not in ahead.line()
    assert "about 2 min" in ahead.line(done) and "measuring 50 s" in ahead.line(done) and "earlier run" in ahead.line(done)
    assert steps.done_before({"statistics": 1}, 30, 4)["calibrating"] == 1.0


def test_after_the_first_block_what_is_left_is_known_within_a_factor_of_one_and_a_half() -> None:
    """Seconds of SmolLM2's weights as measured, in a forecast that is four times too high."""
    block = (0.41, 0.36, 0.33, 0.39, 0.53, 0.56, 2.78)
    seconds = [1.10, *block * 30]
    clock = Clock()
    whole = Whole(clock)
    whole.expect([Part("measuring", len(seconds), 4 * sum(seconds))])
    running = whole.begin("measuring", len(seconds))
    for number, each in enumerate(seconds, 1):
        clock.now += each
        running.advance(clock.now)
        if len(block) < number < len(seconds) and (number - 1) % len(block) == 0:
            left = whole.left()
            assert left is not None and 1 / 1.5 < left / sum(seconds[number:]) < 1.5, number


@pytest.mark.parametrize(("columns", "formats", "seconds"), [(576, 11, 0.43), (1536, 19, 2.78)])
def test_measuring_is_forecast_as_it_was_measured(columns: int, formats: int, seconds: float) -> None:
    """CPU time of one weight of SmolLM2 in so many formats, where a forward pass reached 47.6 GFLOP/s."""
    work = Work(formats=19, divisors=(256,) * 8 + (32,) * 9 + (1, 1))
    assert work.formats_of(columns) == formats
    by_columns, by_squares = _MEASURED
    assert 1 / 1.5 < (by_columns + by_squares * columns) * columns * formats / 47.6e9 / seconds < 1.5


def test_what_runs_inside_does_not_slow_what_is_around_it() -> None:
    clock = Clock()
    whole = Whole(clock)
    outer = whole.begin("outer", 4)
    clock.now = 1.0
    inner = whole.begin("inner", 1)
    clock.now, inner.done = 101.0, 1
    whole.end(inner)
    clock.now, outer.done = 102.0, 1
    assert outer.left(clock.now, 1.0) == pytest.approx(3 * 2)


def test_a_log_has_a_line_at_every_step_and_at_least_one_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    log = InLog(every=0.1)
    expect(log, [Part("working", 2, 1.0), Part("ending", 3, 0.1)])
    say(log, "this will need a second")
    for _ in log(range(2), 2, "working"):
        time.sleep(0.35)  # one item takes longer than a "minute"
    with doing(log, "opening"):
        pass
    assert list(log([1, 2, 3], 3, "ending")) == [1, 2, 3]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "this will need a second"
    assert lines[1].startswith("working: 2 to do (all: ")
    assert any(re.fullmatch(r"working: 0 of 2, \d+ s left \(all: \d+ % done, \d+ s left\)", line) for line in lines)
    assert any(line.startswith("working: 1 of 2, ") for line in lines)
    assert not any(line.startswith("opening") for line in lines), "what is no part and is over at once is no line"
    assert any(line.startswith("ending: 3 to do") for line in lines)


def test_what_nobody_expected_is_told_when_it_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    log = InLog(every=0.2)
    with doing(log, "opening the model"):
        time.sleep(0.4)
    assert capsys.readouterr().err.splitlines()[0] == "opening the model"


def test_a_step_that_fails_leaves_no_thread_behind() -> None:
    import threading

    log, before = InLog(every=0.1), threading.active_count()
    with pytest.raises(ZeroDivisionError):
        for item in log([0], 1, "failing"):
            print(1 / item)  # noqa: T201
    time.sleep(0.2)  # threads look every 25 ms whether it is over
    assert threading.active_count() <= before and log.whole.innermost is None


def test_a_terminal_has_a_bar_of_the_whole_above_that_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Console(force_terminal=True, width=100, record=True, file=io.StringIO())
    monkeypatch.setattr("rich.console.Console", lambda **_: shown)
    bars = OnTerminal()
    expect(bars, [Part("working", 3, 1.0)])
    seen: list[list[str]] = []
    for _ in bars(range(3), 3, "working"):
        seen.append([str(task.description) for task in bars._bars.tasks])
        seen += [[str(task.description) for task in bars._bars.tasks] for _ in bars(range(2), 2, "inside")]
    assert seen[0] == ["all", "working"] and seen[1] == ["all", "working", "inside"] and bars._bars is None
    say(bars, "a line that stays")
    assert "a line that stays" in shown.export_text()


def test_every_part_of_a_step_is_what_the_code_says_of_it() -> None:
    code = "\n".join(file.read_text() for file in SOURCE.rglob("*.py") if "meanwhile" not in file.parts)
    for shares in steps.SHARES.values():
        assert sum(share for _, share in shares) == pytest.approx(1)
        assert all(f'"{what}' in code for what, _ in shares)


def test_quantize_without_a_terminal_tells_its_steps(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    words = ("quantize", embedded.MODEL, "-o", tmp_path / "m.gguf", "--format", "q4_0", "--method", "rtn", "--tokens", 128, "--length", 64)
    code, out, err = run(*words)
    lines = err.splitlines()
    assert code == 0 and out == ""
    for step in ("this will need", "quantizing: 29 to do (all: ", "running the float model: 4 to do", "verifying"):
        assert any(line.startswith(step) for line in lines), (step, lines)
    assert run(*words[:3], tmp_path / "n.gguf", *words[4:], "--quiet")[1:] == ("", "")
