"""`fewbits report`: a page from what a run left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewbits.cli.options import Json, Quiet
from fewbits.cli.output import show_json


def report(
    work: Annotated[Path, typer.Argument(metavar="WORK", help="A results.json, a folder that holds one, or the file that was made.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The page to write.")] = Path("report.html"),
    bench: Annotated[
        list[Path] | None, typer.Option("--bench", help="Results of `bench kernels` (-o) or `bench plans` (--json) to show beside it.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """One self-contained page: verdict, frontier, map of the model, errors, ranges, memory, hashes."""
    from fewbits.reporting.page import report as run
    from fewbits.reporting.terminal import console, size

    page = run(work, out, bench=bench or ())
    if as_json:
        show_json({"page": str(page), "bytes": page.stat().st_size})
    elif not quiet:
        console.print(f"wrote {page} ({size(page.stat().st_size)}); open it in a browser")
