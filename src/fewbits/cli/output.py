"""What a verb prints: with --json one document on stdout; otherwise the tables of data verbs on stdout, all else on stderr."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from fewbits.store.files import to_json

if TYPE_CHECKING:
    from fewbits.progress import Progress

T = TypeVar("T")


def progress_for(as_json: bool, quiet: bool) -> Progress[Any]:
    from fewbits.progress import silent
    from fewbits.reporting import meanwhile

    if as_json or quiet:
        return silent
    return meanwhile.shown()


def show(result: T, table: Callable[[T], None], as_json: bool, quiet: bool = False) -> None:
    """`table` prints the result for a person; --json prints its `to_dict()` instead."""
    if as_json:
        show_json(result.to_dict())  # type: ignore[attr-defined]
    elif not quiet:
        table(result)


def show_data(result: T, table: Callable[[T], None], as_json: bool, quiet: bool = False) -> None:
    """The same for verbs that are asked for data: their tables go to stdout, so that `| grep`, `| less` and `> FILE` work."""
    from fewbits.reporting.terminal import console

    with console.on_stdout():
        show(result, table, as_json, quiet)


def show_json(value: object) -> None:
    typer.echo(to_json(value))


def note_default_text(model: str, what: str) -> None:
    """For a model other than the embedded one, whose own text this is."""
    from fewbits import embedded
    from fewbits.reporting.terminal import note

    if Path(model).resolve() != embedded.MODEL.resolve():
        note(f"no `--data` given: {what} on Python documentation, which may be unlike what this model is used for")
