"""Progress on a terminal: a bar for the whole, if it is known what that is, above the bars of what is being done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from fewbits.progress import NOTE
from fewbits.reporting.meanwhile.whole import Running, Whole, duration

T = TypeVar("T")
_PARTS = 1000  # of the bar of the whole


class OnTerminal:
    def __init__(self) -> None:
        self.whole = Whole()
        self._bars: Any = None
        self._all: Any = None  # the bar of the whole; None: nobody said what that is
        self._active = 0

    def __call__(self, items: Iterable[T], total: int, what: str) -> Iterator[T]:
        if total == NOTE:
            self._console().print(what, highlight=False)
            yield from items
            return
        running = self.whole.begin(what, total)
        self._enter()
        task = self._bars.add_task(what, total=total, count="", left="")
        try:
            self._show(running, task)
            for item in items:
                yield item
                running.advance(self.whole.clock())
                self._show(running, task)
        finally:
            self._bars.remove_task(task)
            self.whole.end(running)
            self._leave()

    def _show(self, running: Running, task: Any) -> None:
        left = running.left(self.whole.clock(), self.whole.correction)
        rest = f"{duration(left)} left" if left is not None and running.done else ""
        self._bars.update(task, completed=running.done, count=f"{running.done:,}/{running.total:,}", left=rest)
        share, all_left = self.whole.share(), self.whole.left()
        if self._all is not None and share is not None and all_left is not None:
            self._bars.update(
                self._all, completed=round(_PARTS * share), count=f"{100 * share:.0f} %", left=f"about {duration(all_left)} left"
            )

    def _console(self) -> Any:
        from rich.console import Console

        return self._bars.console if self._bars else Console(stderr=True)

    def _enter(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._active += 1
        if self._active == 1:
            texts = [TextColumn(f"{{task.{each}}}") for each in ("description", "fields[count]", "fields[left]")]
            self._bars = Progress(
                texts[0], BarColumn(), texts[1], TimeElapsedColumn(), texts[2], console=Console(stderr=True), transient=True
            )
            self._all = self._bars.add_task("all", total=_PARTS, count="", left="") if self.whole.expected else None
            self._bars.start()

    def _leave(self) -> None:
        self._active -= 1
        if self._active == 0:
            self._bars.stop()
            self._bars = self._all = None
