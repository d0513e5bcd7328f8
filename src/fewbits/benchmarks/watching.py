"""A child process looked at until it ends: the memory it had, the disk it took and the time, for each of the steps that it names.

RssAnon is what a process needs. Pages of mapped files (RssFile) are given back whenever memory is short, and are told beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from fewbits.errors import InputError

T = TypeVar("T")
_LOOK = 0.02  # seconds between two looks at a process
_LOOK_AT_DISK = 1.0
_STEP = "step:"  # what a child says before the name of what it does next
_FIELDS = ("RssAnon", "RssFile")


@dataclass
class Phase:
    """A step, by the name that its progress has; what comes after it and has no name counts to it."""

    name: str
    seconds: float = 0.0
    anonymous: int = 0  # bytes at the most
    mapped: int = 0


@dataclass
class Watched:
    seconds: float = 0.0
    anonymous: int = 0  # bytes at the most
    mapped: int = 0
    disk: int = 0  # bytes at the most that lay in its folder
    phases: list[Phase] = field(default_factory=list)

    @property
    def largest(self) -> Phase:
        """The step that takes most anonymous memory."""
        return max(self.phases, key=lambda phase: phase.anonymous)


def watch(command: Sequence[str], folder: Path) -> tuple[Watched, dict[str, Any]]:
    """Runs it and looks at it until it ends. Its last line of output is its result, in JSON; `followed` says what it does in others."""
    found, lines = Watched(phases=[Phase("starting")]), [""]
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        said: list[str] = []
        listeners = [
            threading.Thread(target=_listen, args=(child.stdout, found.phases, lines), daemon=True),
            threading.Thread(target=lambda: said.append(child.stderr.read() if child.stderr else ""), daemon=True),
        ]
        for listener in listeners:
            listener.start()
        looked, last = begun, begun
        while child.poll() is None:
            now = time.perf_counter()
            phase = found.phases[-1]
            phase.seconds, last = phase.seconds + now - last, now
            anonymous, mapped = resident(child.pid)
            phase.anonymous, phase.mapped = max(phase.anonymous, anonymous), max(phase.mapped, mapped)
            if now - looked >= _LOOK_AT_DISK:
                found.disk, looked = max(found.disk, _disk(folder)), now
            time.sleep(_LOOK)
        for listener in listeners:
            listener.join()
    if child.returncode:
        raise InputError(f"the run ended with code {child.returncode}", "".join(said).strip()[-2000:] or "it said nothing")
    found.seconds = time.perf_counter() - begun
    found.anonymous = found.largest.anonymous
    found.mapped = max(phase.mapped for phase in found.phases)
    return found, json.loads(lines[0])


def _listen(stream: IO[str], phases: list[Phase], last: list[str]) -> None:
    for line in stream:
        if line.startswith(_STEP):
            name = line.removeprefix(_STEP).strip()
            if name != phases[-1].name:
                phases.append(Phase(name))
        elif line.strip():
            last[0] = line


def resident(process: int) -> tuple[int, int]:
    """(anonymous, mapped from files), in bytes; zeros once it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    found = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(_FIELDS)}
    return found.get(_FIELDS[0], 0), found.get(_FIELDS[1], 0)


def _disk(folder: Path) -> int:
    """Of all files, each once however many names it has."""
    found = {}
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # removed meanwhile
                about = Path(path, name).lstat()
                found[about.st_ino] = about.st_blocks * 512
    return sum(found.values())


def followed(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """A progress that a parent process can follow."""
    if total >= 0:
        sys.stdout.write(f"{_STEP} {what}\n")
        sys.stdout.flush()
    yield from items
