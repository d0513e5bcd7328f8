"""Folders for a while: gone when done, and those of the dead are removed; nobody else's ever is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fewbits.store.scratch import scratch_folder

CHILD = """
import sys
from fewbits.store.scratch import scratch_folder
with scratch_folder() as folder:
    open(folder + "/large", "w").write("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def child() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    return process, Path(process.stdout.readline().strip())


def age(path: Path) -> None:
    os.utime(path, (0, 0))


def test_one_of_a_killed_process_is_removed_and_one_in_use_is_not(temporary: Path) -> None:
    (dead, left), (alive, used) = child(), child()
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    others = [temporary / "fewbits-scratch-mine", temporary / "fewbits-out"]
    for path in others:
        path.mkdir()
        age(path)
    for path in (left, used):
        age(path)
    with scratch_folder() as folder:
        assert Path(folder).is_dir() and not left.exists() and (used / "large").exists() and all(path.exists() for path in others)
    alive.communicate("")
    assert sorted(temporary.iterdir()) == sorted(others)


def test_one_that_was_made_a_moment_ago_is_left_alone() -> None:
    young = Path(tempfile.mkdtemp(prefix="fewbits-scratch-"))
    with scratch_folder():
        assert young.exists()
    age(young)
    with scratch_folder():
        assert not young.exists()
