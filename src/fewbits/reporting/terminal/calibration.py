"""What `fewbits calibrate` shows: how much text was run, what it covers, and what more of it would still change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from fewbits.reporting.terminal import console, new_table, note, size

if TYPE_CHECKING:
    from pathlib import Path

    from fewbits.calibration import Calibrated


def show(result: Calibrated) -> None:
    coverage = result.coverage
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row(
        "samples", f"{coverage.samples:,} of {coverage.lengths.least} to {coverage.lengths.most} tokens (median {coverage.lengths.median})"
    )
    table.add_row("tokens", f"{coverage.tokens:,}")
    table.add_row("vocabulary coverage", f"{coverage.vocabulary_seen:.1%} of {coverage.vocabulary:,}")
    if missing := coverage.missing_in_evaluation:
        named = ", ".join(repr(token.text) for token in missing.most_frequent[:5])
        table.add_row("unseen in the held-out text", f"{missing.occurrences:.2%} of its tokens" + (f", such as {named}" if named else ""))
    if coverage.overlap:
        table.add_row("shared with it", f"{coverage.overlap.share:.2%} of its {coverage.overlap.n}-grams")
    for kind in coverage.domains if len(coverage.domains) > 1 else ():
        table.add_row("kind of text", f"{escape(kind.name)}: {kind.share:.0%} ({kind.samples} samples)")
    for source in coverage.sources[:8]:
        table.add_row("from", f"{escape(source.name)}: {source.share:.0%} ({source.samples} samples)")
    for name, counts in result.statistics.about["experts"].items():
        idle = sum(count == 0 for count in counts)
        table.add_row("experts", f"{escape(name)}: {len(counts) - idle} of {len(counts)} reached, the least {min(counts)} times")
    console.print(table)
    if result.drift:
        rows = [result.drift[0], result.drift[len(result.drift) // 2], result.drift[-1]]
        table = new_table("from half of the samples to all: what more data would still change", ("weight", "importance", "Hessian"))
        for which, row in zip(("most", "middle", "least"), rows, strict=True):
            moved = "" if row.hessian is None else f"{row.hessian:.1%}"
            table.add_row(f"{which}: {escape(row.weight)}", f"{row.importance:.1%}", moved)
        console.print(table)
    for warning in coverage.warnings:
        note(warning)
    console.print(f"wrote {escape(str(result.folder))}/")


def wrote_importance(path: Path) -> None:
    takes = "`fewbits quantize --imatrix` and llama.cpp's `llama-quantize --imatrix` take it"
    console.print(f"wrote {escape(str(path))} ({size(path.stat().st_size)}), llama.cpp's importance matrix: {takes}", soft_wrap=True)
