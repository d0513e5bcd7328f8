"""Tables that fit the screen: what is too wide loses whole columns, the least needed first. No figure is cut.

The columns and rows come in; what fits goes out as a table of rich.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text


class Column(NamedTuple):
    name: str
    rank: int = 0  # the highest is dropped first; 0: never
    right: bool = False
    least: int | None = None  # characters that it may shrink to, with its words on several lines; None: it never shrinks


def fitted(title: str | None, columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int) -> Table:
    """`rows` are in markup, with a cell for each column."""
    rows = [list(row) for row in rows]
    widths = [max([cell_len(column.name), *(_length(row[at]) for row in rows)]) for at, column in enumerate(columns)]
    kept = list(range(len(columns)))

    def needed() -> int:
        return sum(min(widths[at], columns[at].least or widths[at]) + 1 for at in kept)

    while needed() > width and any(columns[at].rank for at in kept):
        kept.remove(max(kept, key=lambda at: columns[at].rank))
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), header_style="dim")
    spare = max(0, width - needed())
    for at in kept:
        column = columns[at]
        wide = widths[at]
        if column.least is not None and column.least < wide:
            wide = min(wide, column.least + spare)
            spare -= wide - column.least
        whole = column.least is None and needed() <= width
        table.add_column(
            column.name, justify="right" if column.right else "left", no_wrap=whole, width=wide if whole else None, overflow="fold"
        )
    for row in rows:
        table.add_row(*(row[at] for at in kept))
    return table


def _length(markup: str) -> int:
    return max((cell_len(line) for line in Text.from_markup(markup).plain.splitlines()), default=0)
