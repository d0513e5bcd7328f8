"""Results on a person's screen: a file for each kind of result, and here what they share. All goes to stderr: stdout is for data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

console = Console(stderr=True, highlight=False)


def size(nbytes: float) -> str:
    """Three digits at least: 950 B, 7.42 MB, 271 MB."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"


def error(message: str, hint: str = "") -> None:
    console.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    if hint:
        console.print(f"\n[bold]hint:[/] {escape(hint)}", soft_wrap=True)


def note(message: str) -> None:
    console.print(f"[yellow]note:[/] {escape(message)}", soft_wrap=True)


def judged(failures: Sequence[str], asked: bool) -> None:
    """The end of a verdict. `asked`: a threshold was given."""
    for failure in failures:
        console.print(f"[bold red]failed:[/] {escape(failure)}")
    if not failures:
        console.print("[bold green]passed[/]" if asked else "[bold green]ran[/], no threshold was asked for")


def new_table(title: str | None, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        right = number > 0 and any(
            word in column for word in ("bytes", "bits", "KL", "ratio", "top-1", "error", "search", "per ", "less", "Gw/s", "std", "peak")
        )
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table
