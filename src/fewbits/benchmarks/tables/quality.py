"""What `fewbits bench quality` and `fewbits bench plans` show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape

from fewbits.reporting.terminal import console, new_table, size

if TYPE_CHECKING:
    from fewbits.benchmarks.quality.contest import Judged, OnText, Paired
    from fewbits.benchmarks.quality.plans import MixRow
    from fewbits.benchmarks.quality.same_bytes import FormatRow

_PAIRED = ("KL", "KL ratio", "95 %", "top-1", "perplexity ratio")


def formats(result: Judged[FormatRow]) -> None:
    for judged in result.texts:
        _title(result.model, judged)
        table = new_table(None, ("format", "bits/w", "made by", *_PAIRED))
        for row in judged.rows:
            table.add_row(row.format, f"{row.bits_per_weight:.3g}", row.maker, *_paired(row.found))
        console.print(table)


def mixes(result: Judged[MixRow]) -> None:
    for judged in result.texts:
        _title(result.model, judged)
        table = new_table(None, ("size of", "bits/w", "made by", "file", "predicted", *_PAIRED))
        for row in judged.rows:
            predicted = "" if row.predicted is None else f"{row.predicted:.4f}"
            table.add_row(row.mix, f"{row.bits_per_weight:.3f}", row.maker, size(row.bytes), predicted, *_paired(row.found))
        console.print(table)


def _title(model: str, judged: OnText[Any]) -> None:
    where = f"[bold]{escape(model)}[/] in llama.cpp on {judged.tokens:,} tokens of {escape(judged.text)}"
    console.print(f"{where}; KL floor {judged.kl_floor:.1e} (float file), {judged.kl_q8_0:.1e} (q8_0)")


def _paired(figures: Paired) -> tuple[str, ...]:
    low, high = figures.kl_ratio_ci95
    return f"{figures.kl:.4f}", f"{figures.kl_ratio:.3f}", f"{low:.3f} .. {high:.3f}", f"{figures.top1:.2%}", f"{figures.ppl_ratio:.4f}"
