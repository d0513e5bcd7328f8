"""What a runtime gave, beside the float model: of a language model, or of an encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from fewbits.embeddings import EmbeddingVerdict
from fewbits.reporting import terminal

if TYPE_CHECKING:
    from fewbits.verification import Verdict

_POOLED = {"mean": "the mean of a text's tokens", "cls": "a text's first token", "last": "a text's last token"}


def show(found: Verdict | EmbeddingVerdict) -> None:
    if isinstance(found, EmbeddingVerdict):
        _embeddings(found)
    else:
        terminal.verdict(found)


def _embeddings(found: EmbeddingVerdict) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    low, high = found.cosine_ci95
    table.add_row("runtime", f"{found.runtime} ({found.runtime_version})")
    table.add_row("size", f"{terminal.size(found.bytes)}, {found.bits_per_weight:.3f} bits per weight")
    table.add_row("texts", f"{found.texts:,} of {found.tokens:,} tokens")
    compared = _POOLED[found.pooling] if found.pooling else "every token: the file does not say how a text is pooled"
    table.add_row("compared", compared)
    table.add_row("cosine to float", f"{found.cosine_mean:.5f}  (95 %: {low:.5f} .. {high:.5f}; the least {found.cosine_least:.5f})")
    if found.cosine_floor is not None:
        table.add_row("  of the float file", f"{found.cosine_floor:.5f}  (in the same runtime)")
    table.add_row("relative error", f"{found.relative_error:.2e}")
    terminal.console.print(table)
    for failure in found.failures:
        terminal.console.print(f"[bold red]failed:[/] {escape(failure)}")
    if found.passed:
        asked = found.thresholds.min_cosine is not None
        terminal.console.print("[bold green]passed[/]" if asked else "[bold green]ran[/], no threshold was asked for")
