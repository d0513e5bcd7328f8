"""Several parts of work as one: how much of it is done, and how long the rest will take.

Before a part has begun its forecast counts, corrected by how the parts before it went. From its first finished item on, its own speed
counts. A part with fewer items than were forecast (a run that was stopped had done the others) counts for as much less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fewbits.progress import Part

_NO_TIME, _FOUND = 1e-3, 0.02  # seconds, and share of the forecast for an item, below which it was not done but found


@dataclass
class Running:
    """A part, or anything else that progress is shown of, while it is being done."""

    what: str
    total: int
    forecast: float | None  # seconds; None: nobody expected it
    done: int = 0
    found: int = 0  # of them, those that took no time: an earlier run had done them
    spent: float = 0.0  # seconds, without what runs inside of it
    since: float = 0.0
    announced: bool = False  # a line was written when it began

    def __post_init__(self) -> None:
        self.began = self._last = self.since

    def left(self, now: float, correction: float) -> float | None:
        """Seconds; None: nothing is known."""
        spent, rest = self.spent + now - self.since, self.total - self.done
        if self.done > self.found:
            return spent / (self.done - self.found) * rest
        return None if self.forecast is None else max(0.0, self.forecast * correction * rest / max(1, self.total) - spent)

    def advance(self, now: float) -> None:
        self.done += 1
        usual = (self.forecast or 0.0) / max(1, self.total)
        self.found += now - self._last < max(_NO_TIME, usual * _FOUND)
        self._last = now


class Whole:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._began = clock()
        self._pending: list[Part] = []
        self._running: list[Running] = []  # the innermost last
        self._real = self._forecast = 0.0  # seconds of finished parts

    def expect(self, parts: Sequence[Part]) -> None:
        """Again while the work goes on: what is left of it has changed."""
        if not self.expected:
            self._began = self.clock()
        self._pending = list(parts)
        self._real = self._forecast = 0.0

    @property
    def expected(self) -> bool:
        return bool(self._pending or any(each.forecast is not None for each in self._running) or self._forecast)

    @property
    def innermost(self) -> Running | None:
        return self._running[-1] if self._running else None

    def begin(self, what: str, total: int) -> Running:
        """Parts before it in the list are not waited for any longer: there was nothing left to do for them."""
        now = self.clock()
        if self._running:
            outer = self._running[-1]
            outer.spent += now - outer.since
        at = next((index for index, part in enumerate(self._pending) if part.what == what), None)
        forecast = None
        if at is not None:
            part = self._pending[at]
            del self._pending[: at + 1]
            forecast = part.seconds * min(1.0, total / part.items) if part.items else part.seconds
        self._running.append(Running(what, total, forecast, since=now))
        return self._running[-1]

    def end(self, running: Running) -> None:
        now = self.clock()
        if running not in self._running:
            return
        running.spent += now - running.since
        if running.forecast is not None and running.done > running.found:
            share = (running.done - running.found) / max(1, running.total)
            self._real, self._forecast = self._real + running.spent, self._forecast + running.forecast * share
        self._running.remove(running)
        if self._running:
            self._running[-1].since = now

    @property
    def correction(self) -> float:
        """How much longer parts take than was forecast, as far as is seen."""
        real, forecast = self._real, self._forecast
        now = self.clock()
        for each in self._running:
            if each.forecast and each.done > each.found:
                real += each.spent + (now - each.since if each is self._running[-1] else 0.0)
                forecast += each.forecast * (each.done - each.found) / each.total
        return real / forecast if forecast > 0 and real > 0 else 1.0

    def left(self) -> float | None:
        """Seconds until all parts are done; None: nobody said what they are."""
        if not self.expected:
            return None
        now, correction = self.clock(), self.correction
        seconds = sum(part.seconds * correction for part in self._pending)
        for each in self._running:
            at = now if each is self._running[-1] else each.since
            seconds += each.left(at, correction) or 0.0
        return seconds

    def share(self) -> float | None:
        """Of the time of all parts, how much is over."""
        left = self.left()
        over = self.clock() - self._began
        return None if left is None or over + left <= 0 else over / (over + left)


def duration(seconds: float) -> str:
    """For a person: 12 s, 4 min, 1.5 h."""
    if seconds < 90:
        return f"{max(1.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
