"""A run that is killed and called again ends with the bytes of one that was not, wherever it was killed, and does nothing twice."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from interrupted import BUDGETS, Runs, dies_at, forked, places, survives, tiny_model

from fewbits import embedded
from fewbits.calibration import collector
from fewbits.store.cache import Cache


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def by_size(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tiny, tmp_path_factory.mktemp("size") / "out", BUDGETS["size"])
    assert runs.units == {"forward": 2, "backward": 2, "measured": 15, "quantized": 15}
    return runs


def killed_at_writes(runs: Runs, chosen: Callable[[int], list[int]]) -> str:
    """How many places of how many."""
    count = runs.writes()
    runs.counted_units()

    def kill(place: int) -> None:
        assert runs.ends(dies_at(place)) == signal.SIGKILL
        runs.goes_on(f"killed at write {place} of {count}")

    return f"{survives(partial(kill, place) for place in chosen(count))} of {count}"


def test_killed_at_some_writes(by_size: Runs) -> None:
    killed_at_writes(by_size, lambda count: random.Random(0).sample(range(count), 4))


def test_killed_on_the_way_to_an_accuracy(tiny: Path, tmp_path: Path) -> None:
    runs = Runs(tiny, tmp_path / "out", BUDGETS["accuracy"])
    assert runs.whole["m.fewbits.work/results.json"].count(b'"predicted"') >= 2  # rounds
    killed_at_writes(runs, lambda count: [count * 2 // 3])


@pytest.mark.slow
@pytest.mark.parametrize("budget", list(BUDGETS))
def test_killed_at_every_write(tiny: Path, tmp_path: Path, budget: str, record_property: Callable[[str, object], None]) -> None:
    tried = killed_at_writes(Runs(tiny, tmp_path / "out", BUDGETS[budget]), places)
    record_property("table", f"{budget}: killed at {tried} writes and gone on with, to the same bytes")


def killed_at_moments(runs: Runs, moments: int) -> int:
    drawn = random.Random(0)

    def kill() -> None:
        while True:  # one that ended before its moment came was not killed
            moment = drawn.uniform(0, runs.seconds)
            if runs.ends(killed_after=moment) == signal.SIGKILL:
                return runs.goes_on(f"killed after {moment:.3f} s of {runs.seconds:.3f}")

    return survives(kill for _ in range(moments))


@pytest.mark.slow
@pytest.mark.parametrize("budget", list(BUDGETS))
def test_killed_at_25_random_moments(tiny: Path, tmp_path: Path, budget: str, record_property: Callable[[str, object], None]) -> None:
    survived = killed_at_moments(Runs(tiny, tmp_path / "out", BUDGETS[budget]), 25)
    record_property("table", f"{budget}: killed at {survived} random moments and gone on with, to the same bytes")


@pytest.mark.slow
def test_killed_at_random_moments(by_size: Runs) -> None:
    killed_at_moments(by_size, 2)


@pytest.mark.slow
def test_the_embedded_model_killed_at_25_random_moments(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    options = {"size": "4.5bpw", "formats": ("q3_k", "q4_k", "q8_0"), "samples": 8, "tokens": 512}
    survived = killed_at_moments(Runs(embedded.MODEL, tmp_path / "out", options), 25)
    record_property("table", f"embedded model: killed at {survived} random moments and gone on with, to the same bytes")


def test_a_run_that_ended_is_not_run_again(by_size: Runs) -> None:
    assert by_size.ends() == 0
    cache = by_size.path.with_name("m.gguf.work") / "cache"
    times = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    by_size.counted_units()
    assert forked(by_size.run) == 0 and set(by_size.counted_units().values()) == {0}
    assert len(times) > 30 and times == {path: path.stat().st_mtime_ns for path in cache.iterdir()}


def test_a_sequential_run_that_ended_is_not_run_again(tiny: Path, tmp_path: Path) -> None:
    runs = Runs(tiny, tmp_path / "out", BUDGETS["sequential, tuned"])
    assert runs.units["quantized"] == 15
    assert forked(runs.run) == 0 and set(runs.counted_units().values()) == {0}  # the embedding too, which is in no block


@pytest.mark.slow
def test_another_budget_takes_what_it_can_and_leaves_nothing_behind(by_size: Runs) -> None:
    other = Runs(by_size.model, by_size.out, {**by_size.options, "size": "8bpw"})
    assert by_size.ends() == 0
    by_size.counted_units()
    assert forked(other.run) == 0
    done = other.counted_units()
    assert done["forward"] == done["measured"] == 0 and 0 < done["quantized"] < other.units["quantized"]
    assert other.files() == other.whole  # the results kept too: those that only the first one used are gone


def test_statistics_that_were_damaged_are_made_again(by_size: Runs) -> None:
    assert by_size.ends() == 0
    by_size.counted_units()
    damaged = by_size.path.with_name("m.gguf.work") / "statistics" / "input-00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-9] ^= 1
    damaged.unlink()  # it may be another's file too, by a link
    damaged.write_bytes(content)
    assert forked(by_size.run) == 0
    assert by_size.files() == by_size.whole and by_size.counted_units() == {"forward": 2, "backward": 2, "measured": 0, "quantized": 0}


def test_a_state_that_is_gone_is_made_again(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed on the way back and robbed of the hidden states, calibration goes through the blocks once more."""
    from fewbits import calibration, model
    from fewbits.calibration import Statistics

    source = model.open(tiny)
    drawn = calibration.draw(source, (), 4, 32, 0)
    whole = calibration.collect(source, drawn, tmp_path / "whole")
    real = collector.Collector._backward

    def stops(self: collector.Collector, index: int) -> Any:
        if index == 0:
            raise KeyboardInterrupt
        return real(self, index)

    monkeypatch.setattr(collector.Collector, "_backward", stops)
    with pytest.raises(KeyboardInterrupt):
        calibration.collect(source, drawn, tmp_path / "half", cache=Cache(tmp_path / "cache"))
    monkeypatch.undo()
    for path in [*(tmp_path / "cache").glob("hidden-*"), *(tmp_path / "cache").glob("back-*")]:
        path.unlink()
    again: Statistics = calibration.collect(source, drawn, tmp_path / "half", cache=Cache(tmp_path / "cache"))
    assert again.digest == whole.digest
