"""How work tells what it is doing: `progress(items, how many, what is being done)` gives the same items back, one at a time.

Who shows it is in reporting/meanwhile/: bars on a terminal, lines in a log; nobody with --quiet or --json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Progress = Callable[[Iterable[T], int, str], Iterator[T]]  # (items, how many, what is being done) -> the same items
NOTE = -1  # in place of how many: nothing is being done, something is said


class Part(NamedTuple):
    """Of work that is about to be done."""

    what: str  # as `progress` will be told
    items: int  # 0: not known
    seconds: float  # forecast for all items


def silent(items: Iterable[T], total: int, what: str) -> Iterator[T]:  # noqa: ARG001 - the signature of every Progress
    yield from items


def by_bars(bar: Callable[..., Any]) -> Progress[Any]:
    """With the bars of tqdm, or of a class that is called like it: `bar(items, total=..., desc=...)`."""

    def shown(items: Iterable[T], total: int, what: str) -> Iterator[T]:
        if total == NOTE:
            getattr(bar, "write", print)(what, file=sys.stderr)
            return
        steps = bar(items, total=total or None, desc=what)
        try:
            yield from steps
        finally:
            getattr(steps, "close", lambda: None)()

    return shown


def say(progress: Progress[Any], note: str) -> None:
    """A line that stays, wherever bars or lines are shown."""
    for _ in progress((), NOTE, note):
        pass


def expect(progress: Progress[Any], parts: Sequence[Part]) -> None:
    """What will be done from now on: the whole, of which each `what` is a part."""
    if (whole := getattr(progress, "whole", None)) is not None:
        whole.expect(parts)


@contextmanager
def doing(progress: Progress[Any], what: str) -> Iterator[None]:
    """One thing that is not counted."""
    steps = iter(progress((None,), 1, what))
    next(steps)
    try:
        yield
        next(steps, None)
    finally:
        getattr(steps, "close", lambda: None)()
