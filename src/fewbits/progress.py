"""Progress on stderr: a bar with rate and time remaining on a terminal, nothing in a pipe or with --quiet or --json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

T = TypeVar("T")
Progress = Callable[[Iterable[T], int, str], Iterator[T]]  # (items, how many, what is being done) -> the same items
_NOTE = -1  # in place of how many: nothing is being done, something is said


def silent(items: Iterable[T], total: int, what: str) -> Iterator[T]:  # noqa: ARG001 - the signature of every Progress
    yield from items


def say(progress: Progress[T], note: str) -> None:
    """A line that stays, wherever bars are shown."""
    for _ in progress((), _NOTE, note):
        pass


def on_terminal(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    if total == _NOTE:
        Console(stderr=True).print(what)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total)
        for item in items:
            yield item
            bars.advance(task)
