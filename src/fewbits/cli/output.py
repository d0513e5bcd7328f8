"""What a verb prints: with --json one document on stdout, otherwise tables, notes and progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from fewbits.store.files import to_json

if TYPE_CHECKING:
    from fewbits.progress import Progress

T = TypeVar("T")


def progress_for(as_json: bool, quiet: bool) -> Progress[Any]:
    from fewbits import progress

    return progress.silent if as_json or quiet or not sys.stderr.isatty() else progress.on_terminal


def show(result: T, table: Callable[[T], None], as_json: bool, quiet: bool = False) -> None:
    """`table` prints the result for a person; --json prints its `to_dict()` instead."""
    if as_json:
        show_json(result.to_dict())  # type: ignore[attr-defined]
    elif not quiet:
        table(result)


def show_json(value: object) -> None:
    typer.echo(to_json(value))


def note_default_text(model: str, what: str) -> None:
    """For a model other than the embedded one, whose own text this is."""
    from fewbits import embedded
    from fewbits.reporting.terminal import note

    if Path(model).resolve() != embedded.MODEL.resolve():
        note(f"no `--data` given: {what} on Python documentation, which may be unlike what this model is used for")
