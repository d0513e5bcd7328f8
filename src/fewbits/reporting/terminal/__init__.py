"""Results on a person's screen: a file for each kind of result, and here what they share.

Notes, errors and what a verb says of its work go to stderr. The tables of verbs that are asked for data (formats, fit, inspect, compare,
plan) go to stdout, so that they can be searched and kept: `with console.on_stdout()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fewbits.devices.units import size as size

_WIDE = 200  # characters of a line in a file or a pipe, where nothing says how wide it is


class Screen(Console):
    @contextmanager
    def on_stdout(self) -> Iterator[None]:
        """What is printed within goes to stdout: with colours only on a terminal, and without a limit to its width in a pipe."""
        before = self.stderr, self._color_system, self._width
        self.stderr = False
        if not self.is_terminal:
            self._color_system = None
            self._width = self._width or _WIDE
        try:
            yield
        finally:
            self.stderr, self._color_system, self._width = before


console = Screen(stderr=True, highlight=False)
_notes = Console(stderr=True, highlight=False)


def error(message: str, hint: str = "") -> None:
    _notes.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    if hint:
        _notes.print(f"\n[bold]hint:[/] {escape(hint)}", soft_wrap=True)


def note(message: str) -> None:
    _notes.print(f"[yellow]note:[/] {escape(message)}", soft_wrap=True)


def judged(failures: Sequence[str], asked: bool) -> None:
    """The end of a verdict. `asked`: a threshold was given."""
    for failure in failures:
        console.print(f"[bold red]failed:[/] {escape(failure)}")
    if asked and not failures:
        console.print("[bold green]passed[/]")


def new_table(title: str | None, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        right = number > 0 and any(
            word in column for word in ("bytes", "bits", "KL", "ratio", "top-1", "error", "search", "per ", "less", "Gw/s", "std", "peak")
        )
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table
