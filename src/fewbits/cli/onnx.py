"""`fewbits quantize` and `fewbits verify` where the float model is an .onnx file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import typer

from fewbits.cli.output import progress_for, show
from fewbits.errors import InputError


def quantize(model: str, out: Path, refused: Mapping[str, object], as_json: bool, quiet: bool, **options: Any) -> NoReturn:
    """`refused`: options that mean nothing here, and whether they were given."""
    from fewbits.onnx_graphs import verbs
    from fewbits.reporting.terminal import onnx_graphs

    _refuse(refused, "an .onnx file is quantized by `--format` or `--plan`, and judged by `--min-cosine` and `--max-error`")
    result = verbs.quantize(model, out, progress=progress_for(as_json, quiet), **options)
    show(result, onnx_graphs.quantized, as_json, quiet)
    raise typer.Exit(0 if result.verdict is None or result.verdict.passed else 1)


def verify(path: Path, against: str, refused: Mapping[str, object], as_json: bool, quiet: bool, **options: Any) -> NoReturn:
    from fewbits.onnx_graphs import verbs
    from fewbits.reporting.terminal import onnx_graphs

    _refuse(refused, "outputs of .onnx files are judged by `--min-cosine` and `--max-error`")
    verdict = verbs.verify(path, against, progress=progress_for(as_json, quiet), **options)
    show(verdict, onnx_graphs.verdict, as_json, quiet)
    raise typer.Exit(0 if verdict.passed else 1)


def refuse_max_error(max_error: float | None) -> None:
    """Of models that are no .onnx files: those are judged by their logits or embeddings."""
    _refuse({"--max-error": max_error}, "use `--max-kl`, `--min-agreement` or `--max-ppl-ratio`; of an encoder `--min-cosine`")


def _refuse(options: Mapping[str, object], hint: str) -> None:
    if name := next((name for name, given in options.items() if given not in (None, False, 0) and given != []), None):
        raise InputError(f"`{name}` does not go with this kind of model", hint)
