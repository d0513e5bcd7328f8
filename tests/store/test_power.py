"""Loss of power, imitated: what was not flushed is lost, and the next run ends with the same bytes all the same.

A run writes down what it flushes and what it renames, and is killed. Then the disk is brought into the worst state that a file system
may show: files that were written and not flushed hold nothing, and names that were changed after their folder was flushed last are as
they were before.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from interrupted import BUDGETS, Runs, counted, places, survives, tiny_model

_link = os.link  # before a child counts its calls


class Disk:
    """What a run had on the disk for good. `aside`: names of files that were replaced or removed, to have them again."""

    def __init__(self, out: Path) -> None:
        self.out, self.log, self.aside = out, out.with_name("disk.jsonl"), out.with_name("aside")

    def dies_at(self, place: int) -> Callable[[], None]:
        def act(number: int, real: partial[Any], args: tuple[Any, ...]) -> Any:
            if number == place:
                os.kill(os.getpid(), signal.SIGKILL)
            name = real.func.__name__
            if name == "fsync":
                result = real(*args)
                self._write("fsync", str(Path(f"/proc/self/fd/{args[0]}").readlink()), _state(os.fstat(args[0])))
                return result
            if name in {"replace", "rename", "link"}:
                source, into = (Path(each).absolute() for each in args[:2])
                before = self._kept_aside(into, number)
                result = real(*args)
                self._write(name, str(source), str(into), before)
                return result
            return real(*args)  # what was removed may come back: only what lies there matters

        return counted(act)

    def loses_power(self) -> tuple[int, int]:
        """(names that went back, files that lost what they held)."""
        log = [json.loads(line) for line in self.log.read_text().splitlines()]
        flushed: dict[str, int] = {}  # folder -> when
        durable = set()
        for when, (what, *args) in enumerate(log):
            if what == "fsync":
                flushed[args[0]] = when
                durable.add(tuple(args[1]))
        back = 0
        for when, (what, *args) in reversed(list(enumerate(log))):
            if what == "fsync" or flushed.get(str(Path(args[1]).parent), -1) > when:
                continue
            source, into, before = Path(args[0]), Path(args[1]), args[2]
            if not into.exists():
                continue
            back += 1
            if what == "link":
                into.unlink()
            else:
                into.rename(source)
            if before:
                os.link(before, into)
        lost = 0
        for path in self.out.rglob("*"):
            if path.is_file() and path.stat().st_size and tuple(_state(path.stat())) not in durable:
                lost += 1
                content = path.read_bytes()
                path.unlink()  # another name of it may be whole
                path.write_bytes(bytes(len(content)))
        return back, lost

    def _kept_aside(self, path: Path, number: int) -> str | None:
        if not path.is_file():
            return None
        self.aside.mkdir(exist_ok=True)
        kept = self.aside / f"{os.getpid()}-{number}"
        _link(path, kept)
        return str(kept)

    def _write(self, *row: object) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _state(about: os.stat_result) -> list[int]:
    return [about.st_ino, about.st_size, about.st_mtime_ns]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def loses_power_at(runs: Runs, chosen: Callable[[int], list[int]]) -> tuple[int, int, int]:
    """How often, and how many names went back and files were lost."""
    disk, count, losses = Disk(runs.out), runs.writes(), list[tuple[int, int]]()
    runs.counted_units()

    def lose(place: int) -> None:
        disk.log.unlink(missing_ok=True)
        assert runs.ends(disk.dies_at(place)) == signal.SIGKILL
        losses.append(disk.loses_power() if disk.log.exists() else (0, 0))
        runs.goes_on(f"power lost at write {place} of {count}: {losses[-1]}")

    tried = survives(partial(lose, place) for place in chosen(count))
    return tried, sum(back for back, _ in losses), sum(lost for _, lost in losses)


@pytest.mark.slow
def test_power_is_lost_at_some_writes(tiny: Path, tmp_path: Path) -> None:
    runs = Runs(tiny, tmp_path / "out", BUDGETS["size"])
    _, went_back, lost = loses_power_at(runs, lambda count: [3, *random.Random(1).sample(range(count), 2), count - 2])
    assert went_back and lost  # or nothing was tried


@pytest.mark.slow
@pytest.mark.parametrize("budget", list(BUDGETS))
def test_power_is_lost_at_every_write(tiny: Path, tmp_path: Path, budget: str, record_property: Callable[[str, object], None]) -> None:
    tried, went_back, lost = loses_power_at(Runs(tiny, tmp_path / "out", BUDGETS[budget]), places)
    record_property("table", f"{budget}: power lost at {tried} writes, {went_back} names went back, {lost} files were lost: the same bytes")


def test_what_was_not_flushed_is_lost_in_this_imitation(tmp_path: Path) -> None:
    """Or the other tests could not fail."""
    out = tmp_path / "out"
    out.mkdir()
    disk = Disk(out)
    if (child := os.fork()) == 0:
        disk.dies_at(3)()
        flushed, plain = out / "flushed", out / "plain"
        for path in (flushed, plain):
            path.write_bytes(b"contents")
        with flushed.open("rb") as file:
            os.fsync(file.fileno())
        (out / "old").write_bytes(b"before")
        plain.replace(out / "moved")
        flushed.replace(out / "old")
        (out / "moved").replace(out / "never")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert disk.loses_power() == (2, 2)
    contents = {path.name: path.read_bytes() for path in out.iterdir()}
    assert contents == {"flushed": b"contents", "old": bytes(6), "plain": bytes(8)}
