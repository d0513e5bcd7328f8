"""`fewbits inspect`: what is in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewbits.cli.options import Json
from fewbits.cli.output import progress_for, show_data


def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint folder, a GGUF, an ONNX or a fewbits artifact.")],
    no_values: Annotated[bool, typer.Option("--no-values", help="Headers only: do not read the weights.")] = False,
    as_json: Json = False,
) -> None:
    """What is in a file: tensors, types, sizes, metadata, distributions, values that are not finite."""
    from fewbits.inspection.contents import inspect as run
    from fewbits.reporting.terminal import inspection

    result = run(path, no_values, progress_for(as_json, False))
    show_data(result, inspection.tensors, as_json)
