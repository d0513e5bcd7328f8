"""`fewbits compare`: files of one model, or formats, ranges, KV caches and blocks, side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fewbits.cli import options
from fewbits.cli.options import Data, Json, Offline, lengths_of
from fewbits.cli.output import note_default_text, progress_for, show_data
from fewbits.errors import InputError


def compare(
    model: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="A model; with --against files and folders of anybody, each judged in its runtime.")
    ],
    against: Annotated[
        str | None, typer.Option("--against", metavar="MODEL", help="Compare files instead: this is the float model they were made of.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="For --against: a page to write. The same command resumes from PAGE.work.")
    ] = None,
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
    weights: options.Weights = None,
    length: options.Length = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="About how many tokens to judge on. Default: 4096, with --against 16384.")
    ] = None,
    memory: options.Memory = "1GB",
    device: options.Device = "auto",
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Files of one model in their runtimes (--against); or reconstruction error by granularity and format, and decode speed; or
    activation ranges; or KV caches; or errors by block."""
    from fewbits.reporting.terminal import inspection, plans

    progress = progress_for(as_json, False)
    if against is not None:
        other = {"--weight": weight, "--formats": formats, "--ranges": ranges, "--stats": stats, "--kv": kv, "--blocks": blocks}
        if name := next((name for name, value in other.items() if value), None):
            raise InputError(f"`{name}` does not go with `--against`", "leave one of them out")
        if not data and not as_json:
            note_default_text(against, "judged")
        _files(
            model, against, as_json, out=out, data=data or (), weights=weights, length=length, tokens=tokens or 16384,
            memory=options.bytes_of(memory), device=device, offline=offline, progress=progress,
        )  # fmt: skip
        return
    one, tokens = _one(model), tokens or 4096
    only_files = {"--out": out, "--weights": weights, "--length": length}
    if name := next((name for name, value in only_files.items() if value), None):
        raise InputError(f"`{name}` goes with `--against`", "name the float model that the files were made of: `--against MODEL`")
    shown: Any
    table: Callable[[Any], None]
    if ranges:
        from fewbits.inspection.ranges import compare_ranges

        if stats is None:
            raise InputError("`--ranges` needs statistics", "make them with `fewbits calibrate MODEL -o STATS`, then add `--stats STATS`")
        shown, table = compare_ranges(stats, levels, progress), inspection.range_errors
    elif kv:
        from fewbits.verification.kv import compare_kv

        shown = compare_kv(one, formats.split(",") if formats else None, lengths_of(lengths), data or (), tokens, offline, progress)
        table = inspection.kv_caches
    elif blocks:
        from fewbits.verification.forecast.accumulation import error_budget

        shown, table = error_budget(one, blocks, data=data or (), tokens=tokens, offline=offline, progress=progress), plans.accumulation
    else:
        from fewbits.inspection.formats import compare as run

        shown = run(one, weight, formats.split(",") if formats else None, bits, offline, progress)
        table = inspection.format_errors
    show_data(shown, table, as_json)


def _files(files: list[str], against: str, as_json: bool, **how: Any) -> None:
    from fewbits.reporting.results.compared import compare_files
    from fewbits.reporting.terminal import comparisons, console

    compared = compare_files(files, against, **how)
    show_data(compared, comparisons.show, as_json)
    if how["out"] and not as_json:
        console.print(f"the page: {how['out']}")


def _one(given: list[str]) -> str:
    if len(given) > 1:
        raise InputError(
            f"{len(given)} models are too many: `{given[1]}` is the second", "to compare files, name the float model: `--against MODEL`"
        )
    return given[0]
