"""Progress where there is no terminal: a line when a part of the whole begins, or when something else has gone on for a second; one a
minute while it lasts, and one at its end if it took long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from fewbits.progress import NOTE
from fewbits.reporting.meanwhile.whole import Running, Whole, duration

T = TypeVar("T")
_EVERY = 60.0  # seconds between two lines at most
_SOON = 1.0  # seconds after which what is no part of the whole is told
_LONG = 5.0  # seconds after which the end of something is worth a line


class InLog:
    def __init__(self, every: float = _EVERY, clock: Callable[[], float] = time.monotonic) -> None:
        self.whole = Whole(clock)
        self._every, self._clock = every, clock
        self._last = clock()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._active = 0

    def __call__(self, items: Iterable[T], total: int, what: str) -> Iterator[T]:
        if total == NOTE:
            self._line(what)
            yield from items
            return
        running, began = self.whole.begin(what, total), self._clock()
        self._enter()
        try:
            if running.forecast is not None:
                self._announce(running)
            for item in items:
                yield item
                running.advance(self.whole.clock())
                if self._clock() - self._last >= self._every:
                    self._tell()
        finally:
            self.whole.end(running)
            self._leave()
        if (took := self._clock() - began) >= _LONG:
            self._line(f"{what}: done in {duration(took)}{self._rest()}")

    def _announce(self, running: Running) -> None:
        running.announced = True
        self._line(f"{running.what}{f': {running.total:,} to do' if running.total > 1 else ''}{self._rest()}")

    def _tell(self) -> None:
        """Where the work is, however long one item takes."""
        running = self.whole.innermost
        if running is None:
            return
        left = running.left(self._clock(), self.whole.correction)
        rest = f", {duration(left)} left" if left is not None and running.total > 1 else ""
        self._line(f"{running.what}: {running.done:,} of {running.total:,}{rest}{self._rest()}")

    def _rest(self) -> str:
        left, share = self.whole.left(), self.whole.share()
        return f" (all: {100 * share:.0f} % done, {duration(left)} left)" if left is not None and share is not None else ""

    def _line(self, text: str) -> None:
        with self._lock:
            self._last = self._clock()
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def _enter(self) -> None:
        self._active += 1
        if self._active == 1:
            self._last = self._clock()
            self._over = threading.Event()
            threading.Thread(target=self._watch, args=(self._over,), daemon=True).start()

    def _leave(self) -> None:
        self._active -= 1
        if self._active == 0:
            self._over.set()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(min(_SOON, self._every) / 4):
            running = self.whole.innermost
            if running is not None and not running.announced and self._clock() - running.began >= min(_SOON, self._every):
                self._announce(running)
            elif self._clock() - self._last >= self._every:
                self._tell()
