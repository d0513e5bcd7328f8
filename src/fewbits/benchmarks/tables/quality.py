"""What `fewbits bench quality` and `fewbits bench plans` show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape

from fewbits.reporting.terminal import console, new_table, size

if TYPE_CHECKING:
    from fewbits.benchmarks.quality.contest import Found, Judged, OnText, ToPeer
    from fewbits.benchmarks.quality.plans import MixRow
    from fewbits.benchmarks.quality.same_bytes import FormatRow

_FOUND = ("KL", "KL ratio", "95 %", "top-1", "top-1 gain", "perplexity ratio", "ours / this")
_ALONE = ("KL", "top-1", "perplexity ratio", "ours / this")  # where llama.cpp's own quantizer takes no part


def formats(result: Judged[FormatRow]) -> None:
    for judged in result.texts:
        _title(result, judged)
        shown = _FOUND if any(row.found.to_peer for row in judged.rows) else _ALONE
        table = new_table(None, ("format", "bits/w", "made by", *shown))
        for row in judged.rows:
            figures = dict(zip(_FOUND, (*_found(row.found), _ours(row.ours)), strict=True))
            table.add_row(row.format, f"{row.bits_per_weight:.3g}", row.maker, *(figures[column] for column in shown))
        console.print(table)


def mixes(result: Judged[MixRow]) -> None:
    for judged in result.texts:
        _title(result, judged)
        table = new_table(None, ("size of", "bits/w", "made by", "file", "predicted", "measured / predicted", *_FOUND))
        for row in judged.rows:
            forecast = (f"{row.predicted:.4f}", f"{row.found.kl / row.predicted:.2f}") if row.predicted else ("", "")
            table.add_row(row.mix, f"{row.bits_per_weight:.3f}", row.maker, size(row.bytes), *forecast, *_found(row.found), _ours(row.ours))
        console.print(table)


def _title(result: Judged[Any], judged: OnText[Any]) -> None:
    where = f"[bold]{escape(result.model)}[/] in {result.runtime} on {judged.tokens:,} tokens of {escape(judged.text)}"
    console.print(f"{where}; KL floor {judged.kl_floor:.1e} (float file), {judged.kl_q8_0:.1e} (q8_0)")


def _found(figures: Found) -> tuple[str, ...]:
    ratio, interval, gain = "", "", ""
    if peer := figures.to_peer:
        low, high = peer.kl_ratio_ci95
        least, most = peer.top1_gain_ci95
        ratio, interval = f"{peer.kl_ratio:.3f}", f"{low:.3f} .. {high:.3f}"
        gain = f"{100 * peer.top1_gain:+.1f} ({100 * least:+.1f} .. {100 * most:+.1f})"
    return f"{figures.kl:.4f}", ratio, interval, f"{figures.top1:.2%}", gain, f"{figures.ppl_ratio:.4f}"


def _ours(beside: ToPeer | None) -> str:
    if beside is None:
        return ""
    low, high = beside.kl_ratio_ci95
    return f"{beside.kl_ratio:.3f} ({low:.3f} .. {high:.3f})"
