"""`--within`: a time as a budget. Settings are chosen by forecasts, corrected by a block that was timed and by the clock."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from zoo.models import build

import fewbits
from fewbits import embedded, formats, model, targets
from fewbits.devices.units import parse_duration
from fewbits.errors import InputError
from fewbits.model.weights import Weight
from fewbits.preflight import probe, within
from fewbits.preflight.schedule import Schedule
from fewbits.preflight.sizes import Sizes
from fewbits.preflight.within import Deadline, Settings
from fewbits.preflight.work import USUAL, Work
from fewbits.progress import silent

GGUF = targets.get("gguf")
EVERY = tuple(formats.get(name) for name in GGUF.candidates)
FULL = Settings(512, EVERY, 200, 16384)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("20min", 1200), ("2h", 7200), ("1.5h", 5400), ("1h30min", 5400), ("1 h 5 m 3 s", 3903), (45, 45), ("2 hours", 7200)],
)
def test_times_as_people_write_them(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "h", "-2h", "2x", "0s", "0.5s", "1e9h", 0, "min20"])
def test_what_is_no_time_is_refused(text: str | float) -> None:
    with pytest.raises(InputError, match="is not a time") as refused:
        parse_duration(text)
    assert "20min" in refused.value.hint


class TestChoice:
    def test_the_way_goes_from_the_least_to_all(self, embedded_model: model.Model) -> None:
        way = within.ladder(FULL, embedded_model.weights)
        assert way[0] == replace(FULL, samples=16, formats=way[0].formats, tune=0, tokens=4096) and way[-1] == FULL
        assert 2 <= len(way[0].formats) <= 6 and len(set(way)) == len(way)
        for low, high in pairwise(way):
            assert (low.samples, low.tune, low.tokens, len(low.formats)) <= (high.samples, high.tune, high.tokens, len(high.formats))

    def test_what_is_done_stays(self, embedded_model: model.Model) -> None:
        drawn = replace(FULL, samples=40)
        assert {settings.samples for settings in within.ladder(drawn, embedded_model.weights, ["calibrating"])} == {40}
        assert {settings.formats for settings in within.ladder(drawn, embedded_model.weights, ["calibrating", "measuring"])} == {EVERY}

    def test_a_file_that_is_made_late_is_judged_on_less(self, embedded_model: model.Model) -> None:
        way = within.ladder(FULL, embedded_model.weights, ["calibrating", "measuring", "quantizing"])
        assert way == [replace(FULL, tokens=1024), FULL]

    def test_few_formats_reach_from_the_smallest_to_the_largest(self, embedded_model: model.Model) -> None:
        some = within.few(EVERY, embedded_model.weights)
        widths = [fmt.bits_per_weight((256, 256)) for fmt in EVERY]
        assert len(some) == 6 and {min(widths), max(widths)} <= {fmt.bits_per_weight((256, 256)) for fmt in some}

    def test_few_formats_are_enough_for_every_weight(self) -> None:
        shapes = [(64, 64), (172, 64), (64, 172), (256, 512)]  # 172 divides by no block
        weights = [Weight(f"w{i}", shape, "mlp", "fp16") for i, shape in enumerate(shapes)]
        every = (*EVERY, formats.get("int4_channel"), formats.get("int8_channel"), formats.get("fp16"))
        some = within.few(every, weights)
        for shape in shapes:
            widths = [[fmt.nbytes(shape) for fmt in which if fmt.fits(shape) is None] for which in (some, every)]
            assert min(widths[0]) == min(widths[1])

    @pytest.mark.parametrize("left", [70, 100, 150, 333, 700, 5000])
    def test_the_last_step_is_taken_as_far_as_time_goes(self, left: float, embedded_model: model.Model) -> None:
        def seconds(settings: Settings) -> float:
            return settings.samples + 2 * len(settings.formats) + settings.tune / 2 + settings.tokens / 1000

        way = within.ladder(FULL, embedded_model.weights)
        chosen = within.choose(way, seconds, left)
        assert seconds(chosen) <= 0.9 * left
        assert chosen == FULL or seconds(chosen) >= 0.8 * left  # most of it is used
        assert bool(within.left_out(FULL, chosen)) == (chosen != FULL)

    def test_what_cannot_be_done_in_time_is_refused(self) -> None:
        with pytest.raises(InputError, match="is too short: the least that is worth doing takes about 2 min"):
            Deadline(60, 0.0, lambda: 0.0).check(120)


class TestSchedule:
    def schedule(self, source: model.Model, seconds: float, now: list[float]) -> Schedule:
        work = Work(samples=512, formats=len(EVERY), divisors=tuple(fmt.block or 1 for fmt in EVERY), tune=200, verified=16384, size="3bpw")
        deadline = Deadline(seconds, 0.0, lambda: now[0])
        return Schedule(deadline, FULL, FULL, source, GGUF, None, work, 2e11, USUAL)

    def test_time_that_went_by_leaves_less(self, embedded_model: model.Model) -> None:
        now = [0.0]
        whole = within.total(self.schedule(embedded_model, 1, now).steps(FULL))
        first = self.schedule(embedded_model, 0.9 * whole, now).settled()
        assert first.chosen != FULL
        now[0] = first.steps(first.chosen)[0].seconds  # that of calibrating
        in_time = first.settled(("calibrating",))
        now[0] *= 1.5
        late = first.settled(("calibrating",))
        assert in_time.chosen.samples == late.chosen.samples == first.chosen.samples
        assert late.chosen.tune < in_time.chosen.tune

    def test_the_settings_of_a_run_that_was_stopped_are_found_again(self, embedded_model: model.Model, tmp_path: Path) -> None:
        now = [0.0]
        first = self.schedule(embedded_model, 100, now).settled().keep(tmp_path)
        again = self.schedule(embedded_model, 100, now).kept(tmp_path)
        assert again is not None and again.chosen == first.chosen
        assert self.schedule(embedded_model, 200, now).kept(tmp_path) is None  # another request
        (tmp_path / "within.json").write_text("{")
        assert self.schedule(embedded_model, 100, now).kept(tmp_path) is None


def test_a_block_is_timed(embedded_model: model.Model) -> None:
    ids = [list(range(256)) for _ in range(8)]
    sizes = Sizes(embedded_model, GGUF, Work(samples=8, length=256), None)
    found = probe.pace(embedded_model, ids, EVERY, "auto", sizes, 1e11, 60)
    assert set(found.by_step) == {"calibrating", "tuning", "measuring", "quantizing"} and all(x > 0 for x in found.by_step.values())
    # against a machine said to be ten times as fast everything takes ten times as long as forecast
    faster = probe.pace(embedded_model, ids, EVERY, "auto", sizes, 1e12, 60)
    assert all(4 < faster.of(step) / found.of(step) < 25 for step in found.by_step)


def run(source: Path, out: Path, **options: Any) -> tuple[Any, list[str], float]:
    said: list[str] = []

    def progress(items: Any, total: int, what: str) -> Any:
        said.append(what)
        return silent(items, total, what)

    began = time.monotonic()
    result = fewbits.quantize(source, out, size="4.5bpw", answers=0, progress=progress, **options)
    return result, said, time.monotonic() - began


def test_with_time_enough_nothing_is_left_out(tmp_path: Path) -> None:
    source = build("llama", tmp_path / "llama")
    result, said, _ = run(source, tmp_path / "m.gguf", within="1h", samples=8, length=64, tokens=256, formats="q4_0,q8_0")
    assert "timing one block of the model" in said and not any("there is time for" in line for line in said)
    settings = json.loads((tmp_path / "m.gguf.work" / "within.json").read_text())
    assert settings["samples"] == 8 == result.coverage.samples and settings["tokens"] == 256
    assert "--within" not in (tmp_path / "m.gguf.README.md").read_text()


@pytest.mark.slow
def test_a_run_ends_in_time_and_says_what_it_left_out(tmp_path: Path) -> None:
    result, said, seconds = run(embedded.MODEL, tmp_path / "m.gguf", within="75s")
    settings = json.loads((tmp_path / "m.gguf.work" / "within.json").read_text())
    assert seconds < 1.05 * 75 and result.coverage.samples == settings["samples"]
    assert (settings["samples"] < 145) == any("there is time for" in line for line in said)
    assert seconds > 0.6 * 75 or settings["samples"] == 145


def test_workers_are_not_timed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="times this process"):
        fewbits.quantize(embedded.MODEL, tmp_path / "m.gguf", size="4.5bpw", within="1h", executor="local:2")
