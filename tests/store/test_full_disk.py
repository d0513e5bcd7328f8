"""A disk that fills up in the middle is a clear error; once there is room, the same call goes on from there, to the same bytes."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import BUDGETS, Runs, counted, forked, places, survives, tiny_model
from small_disk import PAGE, SmallDisk, possible

from fewbits import pipeline, targets
from fewbits.errors import MissingError
from fewbits.targets import export as exporting
from fewbits.targets.gguf import parts
from fewbits.targets.gguf.tensors import FileTensor

_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("onnx", "onnx-genai")]  # seconds for every file


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def by_size(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tiny, tmp_path_factory.mktemp("size") / "out", BUDGETS["size"])


def refused(run: Callable[[], None]) -> bool:
    """Did the disk have no room for it? Any other error is none that a user should see."""
    try:
        run()
    except MissingError as failure:
        assert "the disk is full" in str(failure) and "run the same again" in failure.hint, failure
        return True
    return False


def full_at(runs: Runs, place: int, pages: int, files: int) -> bool:
    """Full from this write on, but for so many pages and files; then there is room again. Was it noticed? The last writes may still fit."""
    note = runs.out.with_name("noticed")

    def first(disk: SmallDisk) -> None:
        def act(number: int, real: partial[Any], args: tuple[Any, ...]) -> Any:
            if number == place:
                disk.fill(pages, files)
            return real(*args)

        counted(act)()
        note.write_text(str(refused(runs.run)))

    def child() -> None:
        disk = SmallDisk(runs.out)
        assert forked(partial(first, disk)) == 0
        disk.free()
        runs.goes_on(f"full at write {place}, but for {pages} pages and {files} files")

    shutil.rmtree(runs.out, ignore_errors=True)
    runs.out.mkdir()
    runs.counted_units()
    assert forked(child) == 0, f"full at write {place}, but for {pages} pages and {files} files"
    return note.read_text() == "True"


def full_at_writes(runs: Runs, chosen: Callable[[int], list[int]]) -> tuple[int, int, int]:
    """At how many places of how many, and at how many it was noticed."""
    if not possible(runs.out):
        pytest.skip("no file system of its own for a process on this system")
    count, noticed = runs.writes(), 0
    runs.counted_units()

    def one(place: int) -> None:
        nonlocal noticed
        drawn = random.Random(place)
        rooms = [(drawn.randrange(12), 1 << 10), (1 << 10, drawn.randrange(3))]  # by turns short of bytes, and of files
        noticed += full_at(runs, place, *rooms[place % 2])

    return survives(partial(one, place) for place in chosen(count)), count, noticed


def test_full_at_some_writes(by_size: Runs) -> None:
    _, _, noticed = full_at_writes(by_size, lambda count: [count // 5, count // 2, count * 7 // 10])
    assert noticed == 3


@pytest.mark.slow
@pytest.mark.parametrize("budget", list(BUDGETS))
def test_full_at_every_write(tiny: Path, tmp_path: Path, budget: str, record_property: Callable[[str, object], None]) -> None:
    tried, count, noticed = full_at_writes(Runs(tiny, tmp_path / "out", BUDGETS[budget]), places)
    record_property("table", f"{budget}: disk full at {tried} of {count} writes, noticed at {noticed}, gone on with, to the same bytes")
    assert noticed > tried // 2


def test_full_at_a_flush_that_finds_no_room(by_size: Runs) -> None:
    """On a system that gives room only when it must: every flush fails, from one on. This one needs no file system of its own."""
    fsync, place = os.fsync, random.Random(2).randrange(20, 60)

    def fills(number: int, real: partial[Any], args: tuple[Any, ...]) -> Any:
        if number >= place and real.func is fsync:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    def child() -> None:
        counted(fills)()
        assert refused(by_size.run)

    shutil.rmtree(by_size.out)
    assert forked(child) == 0
    by_size.goes_on(f"full at write {place}")


@pytest.fixture(scope="module")
def artifact(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artifact") / "m.fewbits"
    options = {"format": "int4_g32", "override": "embed=keep", "method": "rtn", "no_verify": True}  # of which every target has a form
    assert forked(lambda: pipeline.quantize(tiny, path, **options)) == 0
    return path


@pytest.mark.parametrize("target", ["gguf", "fewbits", "safetensors", *_SLOW])
def test_a_file_that_is_not_finished_is_not_there(artifact: Path, tmp_path: Path, target: str) -> None:
    """With room for everything but its last page, and with less; then with all that it needs."""
    if not possible(tmp_path):
        pytest.skip("no file system of its own for a process on this system")
    path = tmp_path / targets.get(target).file_name

    def export() -> None:
        exporting.written(artifact, path, to=target)

    def child() -> None:
        disk = SmallDisk(tmp_path)
        export()
        files = [path] if path.is_file() else list(path.iterdir())
        needed = sum(-(-file.stat().st_size // PAGE) for file in files)
        whole = {file: file.read_bytes() for file in files}
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        for pages in (0, 1, needed // 2, needed - 1):
            disk.fill(pages, 1 << 10)
            assert refused(export), f"{pages} of {needed} pages"
            assert not list(tmp_path.iterdir()), f"{pages} of {needed} pages"
        disk.fill(needed, 1 << 10)
        export()
        assert whole == {file: file.read_bytes() for file in whole}

    assert forked(child) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_tensor_that_is_small_is_not_lost_in_silence() -> None:
    """One that fits into a buffer is written when that is closed, and numpy does not ask how that went."""
    small = torch.ones(10)
    tensor = FileTensor("small", "F32", (10,), small.nbytes, lambda: iter([small]))
    with Path("/dev/full").open("wb", buffering=0) as file:
        small.numpy().tofile(file)
        with pytest.raises(OSError, match="No space"):
            parts._Pieces(tensor).tofile(file)
