"""`fewbits publish`: a file or folder with its model card to the hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fewbits.cli.options import Json, Quiet
from fewbits.cli.output import progress_for, show_json
from fewbits.errors import InputError

if TYPE_CHECKING:
    from fewbits.targets.publishing import Parcel


def publish(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A file or folder that quantize or export wrote, with its model card.")],
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository on the hub; it is made if there is none.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Send without asking; needed where there is no terminal to ask on.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be sent.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Send a file or a folder with its model card to the hub, after showing what will be sent."""
    from fewbits.targets.publishing import parcel, send

    ready = parcel(out, repository, private)
    if not (as_json or quiet):
        _show(ready)
    if not dry_run:
        _confirmed(ready, yes)
        send(ready, progress=progress_for(as_json, quiet))
    if as_json:
        show_json(ready.to_dict() | {"sent": not dry_run})
    elif not quiet:
        typer.echo("nothing was sent" if dry_run else f"sent: https://huggingface.co/{repository}", err=True)


def _confirmed(ready: Parcel, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(f"nobody can be asked whether to send {len(ready.files) + 1} files to `{ready.repository}`", "add `--yes`")
    if not typer.confirm(f"send these to {ready.repository}{' (private)' if ready.private else ', for everybody to see'}?", err=True):
        raise InputError("nothing was sent", "`--dry-run` only shows what would be sent")


def _show(ready: Parcel) -> None:
    from fewbits.reporting.terminal import console, new_table, size
    from fewbits.targets import card

    table = new_table(f"to {ready.repository}", ("file", "bytes"))
    for file in ready.files:
        table.add_row(file.name, size(file.bytes))
    table.add_row(card.NAME, size(len(ready.card.encode())))
    table.add_row("all", size(ready.nbytes))
    console.print(table)
    if ready.left_out:
        console.print(f"not sent: {', '.join(ready.left_out)}", markup=False, soft_wrap=True)
    console.print("the card:", soft_wrap=True)
    console.print(ready.card, markup=False, soft_wrap=True)
