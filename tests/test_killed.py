"""A run that is killed and called again ends with the bytes of one that was not, wherever it was killed, and does nothing twice.

The runs are forks of this process: torch is imported once, and what a kill must not undo is on the disk, not here.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fewbits import embedded, methods, pipeline, sensitivity
from fewbits.calibration import collecting
from fewbits.errors import MissingError
from fewbits.kept import Kept, code_version

_FAST: dict[str, Any] = {"samples": 4, "length": 32, "tokens": 64}
BUDGETS: dict[str, dict[str, Any]] = {
    "size": {"size": "6bpw", "formats": ("q4_0", "q8_0"), **_FAST},
    "accuracy": {"max_kl": 1e-3, "rounds": 3, "formats": ("int4_g32", "int8_channel"), "to": "fewbits", **_FAST},
    "sequential, tuned": {"format": "int4_g32", "sequential": True, "tune": 3, "to": "fewbits", **_FAST},
    "rewritten": {"format": "int4_g32", "rewrite": "awq", "to": "fewbits", **_FAST},
}
UNITS = ("forward", "backward", "measured", "quantized")  # of work, as they are counted here


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=2048,
        max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded.MODEL / name, folder / name)
    return folder


def forked(action: Callable[[], object], killed_after: float | None = None) -> int:
    """The status that a child ended with: 0, or the signal that killed it. Anything that it raises fails the test."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(70)
    if killed_after is not None:
        time.sleep(killed_after)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, "the run failed, see above"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def counted(act: Callable[[int, partial[Any], tuple[Any, ...]], Any]) -> Callable[[], None]:
    """In a child: every flush and every renaming goes through `act`, with its number."""
    number = iter(range(1 << 30))

    def patch() -> None:
        for name in ("fsync", "replace", "rename", "link", "unlink"):
            real = getattr(os, name)
            setattr(os, name, lambda *args, _real=real, **named: act(next(number), partial(_real, **named), args))

    return patch


def dies_at(place: int) -> Callable[[], None]:
    def act(number: int, real: partial[Any], args: tuple[Any, ...]) -> Any:
        if number == place:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    return counted(act)


@dataclass
class Runs:
    """One call of `quantize`, again and again, at one place: results.json names it. A whole run is made first."""

    model: Path
    out: Path
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        self._note = self.out.with_name(f"{self.out.name}-units")
        code_version()  # once, for all forks: the sources may be edited meanwhile
        began = time.monotonic()
        assert forked(self.run) == 0
        self.seconds = time.monotonic() - began
        self.whole, self.units = self.files(), self.counted_units()

    @property
    def path(self) -> Path:
        return self.out / ("m.fewbits" if self.options.get("to") == "fewbits" else "m.gguf")

    def run(self) -> None:
        for name, where, what in [
            ("forward", collecting.Collector, "_forward"),
            ("backward", collecting.Collector, "_backward"),
            ("measured", sensitivity, "_row"),
            ("quantized", type(methods.get("auto")), "quantize"),
        ]:
            setattr(where, what, self._counts(name, getattr(where, what)))  # in a child, which ends afterwards
        pipeline.quantize(self.model, self.path, **self.options)

    def counted_units(self) -> dict[str, int]:
        """Since they were asked for last."""
        done = self._note.read_text().split() if self._note.exists() else []
        self._note.unlink(missing_ok=True)
        return {name: done.count(name) for name in UNITS}

    def files(self) -> dict[str, bytes]:
        """All that a run leaves, the results kept included; how its report looks is another matter."""
        found = {str(path.relative_to(self.out)): path for path in sorted(self.out.rglob("*")) if path.is_file()}
        return {name: path.read_bytes() for name, path in found.items() if not name.endswith(".html")}

    def writes(self) -> int:
        """How many flushes, renamings, links and removals a whole run makes."""
        note = self.out.with_name("writes")

        def act(number: int, real: partial[Any], args: tuple[Any, ...]) -> Any:
            note.write_text(str(number + 1))
            return real(*args)

        self.ends(counted(act))
        return int(note.read_text())

    def ends(self, patch: Callable[[], None] = lambda: None, killed_after: float | None = None) -> int:
        """A run from nothing, with this done to it; what ended it."""

        def child() -> None:
            patch()
            self.run()

        shutil.rmtree(self.out, ignore_errors=True)
        self.counted_units()  # of a run that ended before it could be killed
        return forked(child, killed_after)

    def goes_on(self, what: object) -> None:
        """To the bytes of the whole run, with at most the one in hand done again."""
        assert forked(self.run) == 0
        found, done = self.files(), self.counted_units()
        assert found.keys() == self.whole.keys(), (what, found.keys() ^ self.whole.keys())
        assert [name for name in self.whole if self.whole[name] != found[name]] == [], what
        again = {name: done[name] - self.units[name] for name in UNITS}
        # weights are measured several at a time: with one thread one in hand, and two that wait for it or to be kept
        assert all(0 <= again[name] <= (3 if name == "measured" else 1) for name in UNITS), (what, again)
        assert sum(1 for name in UNITS if again[name]) <= 1, (what, again)

    def _counts(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with self._note.open("a") as file:
                file.write(f"{name}\n")
            return real(*args, **options)

        return call


@pytest.fixture(scope="module")
def by_size(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tiny, tmp_path_factory.mktemp("size") / "out", BUDGETS["size"])
    assert runs.units == {"forward": 2, "backward": 2, "measured": 15, "quantized": 15}
    return runs


def killed_at_writes(runs: Runs, places: Callable[[int], list[int]]) -> int:
    count = runs.writes()
    runs.counted_units()
    for place in places(count):
        assert runs.ends(dies_at(place)) == signal.SIGKILL
        runs.goes_on(f"killed at write {place} of {count}")
    return count


def test_killed_at_some_writes(by_size: Runs) -> None:
    killed_at_writes(by_size, lambda count: random.Random(0).sample(range(count), 4))


def test_killed_on_the_way_to_an_accuracy(tiny: Path, tmp_path: Path) -> None:
    runs = Runs(tiny, tmp_path / "out", BUDGETS["accuracy"])
    assert runs.whole["m.fewbits.work/results.json"].count(b'"predicted"') >= 2  # rounds
    killed_at_writes(runs, lambda count: [count * 2 // 3])


@pytest.mark.slow
@pytest.mark.parametrize("budget", list(BUDGETS))
def test_killed_at_every_write(tiny: Path, tmp_path: Path, budget: str, record_property: Callable[[str, object], None]) -> None:
    count = killed_at_writes(Runs(tiny, tmp_path / "out", BUDGETS[budget]), lambda count: list(range(count)))
    record_property("table", f"{budget}: killed at each of {count} writes and gone on with, to the same bytes")


def killed_at_moments(runs: Runs, moments: int) -> int:
    drawn, survived = random.Random(0), 0
    while survived < moments:
        moment = drawn.uniform(0, runs.seconds)
        if runs.ends(killed_after=moment) == signal.SIGKILL:
            runs.goes_on(f"killed after {moment:.3f} s of {runs.seconds:.3f}")
            survived += 1
    return survived


def test_killed_at_random_moments(by_size: Runs) -> None:
    killed_at_moments(by_size, 2)


@pytest.mark.slow
def test_the_embedded_model_killed_at_25_random_moments(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    options = {"size": "4.5bpw", "formats": ("q3_k", "q4_k", "q8_0"), "samples": 8, "tokens": 512}
    survived = killed_at_moments(Runs(embedded.MODEL, tmp_path / "out", options), 25)
    record_property("table", f"embedded model: killed at {survived} random moments and gone on with, to the same bytes")


def test_a_run_that_ended_is_not_run_again(by_size: Runs) -> None:
    assert by_size.ends() == 0
    kept = by_size.path.with_name("m.gguf.work") / "kept"
    times = {path: path.stat().st_mtime_ns for path in kept.iterdir()}
    by_size.counted_units()
    assert forked(by_size.run) == 0 and set(by_size.counted_units().values()) == {0}
    assert len(times) > 30 and times == {path: path.stat().st_mtime_ns for path in kept.iterdir()}


@pytest.mark.slow
def test_another_budget_takes_what_it_can_and_leaves_nothing_behind(by_size: Runs) -> None:
    other = Runs(by_size.model, by_size.out, {**by_size.options, "size": "8bpw"})
    assert by_size.ends() == 0
    by_size.counted_units()
    assert forked(other.run) == 0
    done = other.counted_units()
    assert done["forward"] == done["measured"] == 0 and 0 < done["quantized"] < other.units["quantized"]
    assert other.files() == other.whole  # the results kept too: those that only the first one used are gone


def test_a_disk_that_fills_up_is_said_and_gone_on_with_when_there_is_room(by_size: Runs) -> None:
    fsync, place = os.fsync, random.Random(2).randrange(20, 60)

    def fills(number: int, real: partial[Any], args: tuple[Any, ...]) -> Any:
        if number >= place and real.func is fsync:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    def child() -> None:
        counted(fills)()
        with pytest.raises(MissingError, match="the disk is full"):
            by_size.run()

    shutil.rmtree(by_size.out)
    assert forked(child) == 0
    by_size.goes_on(f"full at write {place}")


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
    real = collecting.Collector._backward

    def stops(self: collecting.Collector, index: int) -> Any:
        if index == 0:
            raise KeyboardInterrupt
        return real(self, index)

    monkeypatch.setattr(collecting.Collector, "_backward", stops)
    with pytest.raises(KeyboardInterrupt):
        calibration.collect(source, drawn, tmp_path / "half", kept=Kept(tmp_path / "kept"))
    monkeypatch.undo()
    for path in [*(tmp_path / "kept").glob("hidden-*"), *(tmp_path / "kept").glob("back-*")]:
        path.unlink()
    again: Statistics = calibration.collect(source, drawn, tmp_path / "half", kept=Kept(tmp_path / "kept"))
    assert again.digest == whole.digest
