"""Work that is watched from beside it: what it says, its processes, and killing something when it has come so far."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def noting(notes: list[str]) -> Callable[[Iterable[Any], int, str], Iterator[Any]]:
    def progress(items: Iterable[Any], _: int, what: str) -> Iterator[Any]:
        notes.append(what)
        yield from items

    return progress


def children(process: int) -> dict[int, str]:
    """Its child processes, each with the beginning of its command line."""
    found: dict[int, str] = {}
    for tasks in Path(f"/proc/{process}/task").glob("*/children"):
        for child in tasks.read_text().split():
            with suppress(OSError):  # it ended
                found[int(child)] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


@contextmanager
def killing(folder: Path, pattern: str, after: int, kill: Callable[[], bool]) -> Iterator[list[int]]:
    """As soon as so many results are there; `kill` says whether it found something to kill."""
    killed: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set() and not killed:
            if len(there := list(folder.glob(pattern))) >= after and kill():
                killed.append(len(there))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield killed
    finally:
        over.set()
        watcher.join()
