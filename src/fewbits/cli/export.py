"""`fewbits export`: an artifact to a file for a runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewbits.cli.options import Json, Quiet, SplitSize, To
from fewbits.cli.output import progress_for, show_json


def export(
    artifact: Annotated[Path, typer.Argument(help="An output of quantize, its .work folder, or the artifact folder in it.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="File (or folder) to write.")],
    to: To = None,
    split_size: SplitSize = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """One artifact, any target that accepts its formats."""
    from fewbits.inspection.sizes import size_of
    from fewbits.reporting.terminal import console, size
    from fewbits.reporting.terminal.next_commands import show
    from fewbits.targets import card
    from fewbits.targets.export import export as run
    from fewbits.targets.export import how_to_run_exported

    path = run(artifact, out, to=to, split_size=split_size, progress=progress_for(as_json, quiet))
    how = how_to_run_exported(artifact, path, to, split_size)
    if as_json:
        show_json({"file": str(path), "bytes": size_of(path), "card": str(card.place(path)), "how_to_run": how.to_dict()})
    elif not quiet:
        console.print(f"wrote {path} ({size(size_of(path))})")
        console.print(f"the model card: {card.place(path)}")
        show(how)
