"""One request at a time: a bounded queue, and the one thread that generates.

Requests come from an event loop; what they ask for is computed in a thread of its own, which tells them by `said`. It is always the same
thread: OpenMP keeps a pool of threads for every thread that computes.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

_NEWEST = 0.2  # weight of the last turn in the running mean of how long one takes


class FullError(Exception):
    """No more may wait."""

    def __init__(self, waiting: int, seconds: int) -> None:
        super().__init__(f"{waiting} requests are waiting already")
        self.seconds = seconds  # until there may be room


class StoppedError(Exception):
    """Nothing more is begun."""


class Turn:
    """One piece of work: `work(cut)` is iterated over in the thread. `said` is told each item, then None, or what was raised."""

    def __init__(self, work: Callable[[Callable[[], bool]], Iterator[Any]], said: Callable[[Any], None]) -> None:
        self.work, self.said, self._cut = work, said, threading.Event()

    def cut(self) -> bool:
        return self._cut.is_set()

    def stop(self) -> None:
        self._cut.set()


class Turns:
    def __init__(self, limit: int) -> None:
        self.limit = limit  # of those that wait, beside the one whose turn it is
        self._waiting = deque[Turn]()
        self._now: Turn | None = None
        self._changed, self._closed, self._seconds = threading.Condition(), False, 1.0
        self._thread = threading.Thread(target=self._work, name="generation", daemon=True)
        self._thread.start()

    def add(self, turn: Turn) -> None:
        """Raises FullError or StoppedError."""
        with self._changed:
            if self._closed:
                raise StoppedError
            if len(self._waiting) >= self.limit + (self._now is None):  # whose turn it is next does not wait
                raise FullError(len(self._waiting), max(1, math.ceil(self._seconds)))
            self._waiting.append(turn)
            self._changed.notify()

    def withdraw(self, turn: Turn) -> None:
        """Whoever asked has gone: what waits gives its place up, what is being generated ends with the next token."""
        turn.stop()
        with self._changed:
            if turn in self._waiting:
                self._waiting.remove(turn)

    def stop(self) -> None:
        """Cuts off what is being generated and answers all that wait; nothing more is begun."""
        with self._changed:
            self._closed = True
            for turn in (*self._waiting, *filter(None, [self._now])):
                turn.stop()
            self._changed.notify()

    def close(self) -> None:
        self.stop()
        self._thread.join()

    def counts(self) -> dict[str, int]:
        with self._changed:
            return {"running": int(self._now is not None), "waiting": len(self._waiting), "queue": self.limit}

    def _work(self) -> None:
        while True:
            with self._changed:
                self._now = None
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                self._now = self._waiting.popleft()
            began = time.perf_counter()
            _done(self._now)
            self._seconds += _NEWEST * (time.perf_counter() - began - self._seconds)


def _done(turn: Turn) -> None:
    try:
        for item in turn.work(turn.cut):
            turn.said(item)
        turn.said(None)
    except Exception as failure:  # whatever it is, the thread goes on with the next turn
        turn.said(failure)
