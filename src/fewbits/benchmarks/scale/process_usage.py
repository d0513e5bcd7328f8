"""Memory, disk and time of processes. A child process is watched until it ends, for each of the steps that it names.

RssAnon is what a process needs. Pages of mapped files (RssFile) are given back whenever memory is short, and are told beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
    """A step, by the name of its progress bar, with what comes between its end and the next bar."""

    name: str
    seconds: float = 0.0
    anonymous: int = 0  # bytes at the most
    mapped: int = 0


@dataclass
class Usage:
    seconds: float = 0.0
    anonymous: int = 0  # bytes at the most
    mapped: int = 0
    disk: int = 0  # bytes at the most that lay in its folder
    phases: list[Phase] = field(default_factory=list)

    @property
    def largest(self) -> Phase:
        """The step that takes most anonymous memory."""
        return max(self.phases, key=lambda phase: phase.anonymous)


def watch(command: Sequence[str], folder: Path) -> tuple[Usage, dict[str, Any]]:
    """Runs the command and looks at it until it ends. The last line of its output is its result, in JSON; in other lines `followed` names
    its steps. `folder`: whose files count as its disk."""
    usage, lines = Usage(phases=[Phase("starting")]), [""]
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        said: list[str] = []
        listeners = [
            threading.Thread(target=_listen, args=(child.stdout, usage.phases, lines), daemon=True),
            threading.Thread(target=lambda: said.append(child.stderr.read() if child.stderr else ""), daemon=True),
        ]
        for listener in listeners:
            listener.start()
        looked, last = begun, begun
        while child.poll() is None:
            now = time.perf_counter()
            phase = usage.phases[-1]
            phase.seconds, last = phase.seconds + now - last, now
            anonymous, mapped = resident(child.pid)
            phase.anonymous, phase.mapped = max(phase.anonymous, anonymous), max(phase.mapped, mapped)
            if now - looked >= _LOOK_AT_DISK:
                usage.disk, looked = max(usage.disk, _disk(folder)), now
            time.sleep(_LOOK)
        for listener in listeners:
            listener.join()
    if child.returncode:
        raise InputError(f"the run ended with code {child.returncode}", "".join(said).strip()[-2000:] or "it said nothing")
    usage.seconds = time.perf_counter() - begun
    usage.anonymous = usage.largest.anonymous
    usage.mapped = max(phase.mapped for phase in usage.phases)
    return usage, json.loads(lines[0])


def _listen(stream: IO[str], phases: list[Phase], last: list[str]) -> None:
    for line in stream:
        if line.startswith(_STEP):
            name = line.removeprefix(_STEP).strip()
            if name != phases[-1].name:
                phases.append(Phase(name))
        elif line.strip():
            last[0] = line


def resident(process: int) -> tuple[int, int]:
    """(anonymous, mapped from files), in bytes; zeros once it has ended, and where the system does not say."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(_FIELDS)}
    return sizes.get(_FIELDS[0], 0), sizes.get(_FIELDS[1], 0)


@contextmanager
def peak(processes: Callable[[], Iterable[int]] = lambda: [os.getpid()], seconds: float = _LOOK) -> Iterator[list[int]]:
    """The most anonymous memory of any one of these processes while inside, as the one item of a list; none where the system does not say.
    `seconds`: between two looks at them."""
    most: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(seconds):
            most[:] = [largest] if (largest := max([*most, *(resident(each)[0] for each in processes())], default=0)) else []

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield most
    finally:
        over.set()
        watcher.join()


def _disk(folder: Path) -> int:
    """Of all files, each once however many names it has."""
    sizes = {}
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # removed meanwhile
                about = Path(path, name).lstat()
                sizes[about.st_ino] = about.st_blocks * 512
    return sum(sizes.values())


def followed(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """A progress that a parent process can follow."""
    if total >= 0:
        sys.stdout.write(f"{_STEP} {what}\n")
        sys.stdout.flush()
    yield from items
