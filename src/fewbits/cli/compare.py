"""`fewbits compare`: formats, ranges, KV caches and blocks side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fewbits.cli.options import Data, Json, ModelArg, Offline, Tokens, lengths_of
from fewbits.cli.output import progress_for, show_data
from fewbits.errors import InputError


def compare(
    model: ModelArg,
    weight: Annotated[str | None, typer.Option("--weight", help="Only weights whose name matches this regular expression.")] = None,
    formats: Annotated[str | None, typer.Option("--formats", help="These formats, with commas, or all. Default: the usual dozen.")] = None,
    bits: Annotated[int, typer.Option("--bits", min=2, max=8, help="Width for the comparison of granularities.")] = 4,
    ranges: Annotated[bool, typer.Option("--ranges", help="Compare estimators of activation ranges instead; needs --stats.")] = False,
    stats: Annotated[Path | None, typer.Option("--stats", help="Statistics that `fewbits calibrate` wrote.")] = None,
    levels: Annotated[str, typer.Option("--levels", help="For --ranges: int8, int8_asymmetric, fp8_e4m3 or fp8_e5m2.")] = "int8",
    kv: Annotated[bool, typer.Option("--kv", help="Compare KV cache formats at several context lengths instead.")] = False,
    lengths: Annotated[str, typer.Option("--lengths", help="For --kv: context lengths, with commas.")] = "128,512",
    blocks: Annotated[
        Path | None, typer.Option("--blocks", metavar="ARTIFACT", help="How an artifact's errors add up from block to block instead.")
    ] = None,
    data: Data = None,
    tokens: Tokens = 4096,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Reconstruction error by granularity and format, and decode speed; or activation ranges; or KV caches; or errors by block."""
    from fewbits.reporting.terminal import inspection, plans

    progress = progress_for(as_json, False)
    shown: Any
    table: Callable[[Any], None]
    if ranges:
        from fewbits.inspection.ranges import compare_ranges

        if stats is None:
            raise InputError("`--ranges` needs statistics", "make them with `fewbits calibrate MODEL -o STATS`, then add `--stats STATS`")
        shown, table = compare_ranges(stats, levels, progress), inspection.range_errors
    elif kv:
        from fewbits.verification.kv import compare_kv

        shown = compare_kv(model, formats.split(",") if formats else None, lengths_of(lengths), data or (), tokens, offline, progress)
        table = inspection.kv_caches
    elif blocks:
        from fewbits.verification.forecast.accumulation import error_budget

        shown, table = error_budget(model, blocks, data=data or (), tokens=tokens, offline=offline, progress=progress), plans.accumulation
    else:
        from fewbits.inspection.formats import compare as run

        shown = run(model, weight, formats.split(",") if formats else None, bits, offline, progress)
        table = inspection.format_errors
    show_data(shown, table, as_json)
