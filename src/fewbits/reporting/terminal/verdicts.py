"""What a runtime gave, beside the float model: of a language model, or of an encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from fewbits.reporting.closeness import closeness
from fewbits.reporting.terminal import console, judged, new_table, size
from fewbits.verification.embeddings import EmbeddingVerdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fewbits.verification.metrics import Verdict

_COLOURS = {"close": "green", "near": "green", "far": "yellow", "broken": "red"}
_POOLED = {"mean": "the mean of a text's tokens", "cls": "a text's first token", "last": "a text's last token"}


def show(verdict: Verdict | EmbeddingVerdict, predicted: Mapping[str, float] | None = None) -> None:
    """`predicted`: the KL that the plan was expected to cost on each kind of text."""
    if isinstance(verdict, EmbeddingVerdict):
        _embeddings(verdict)
    else:
        _logits(verdict, predicted or {})


def _logits(verdict: Verdict, predicted: Mapping[str, float]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    low, high = verdict.kl_ci95
    table.add_row("runtime", f"{verdict.runtime} ({verdict.runtime_version})")
    table.add_row("size", f"{size(verdict.bytes)}, {verdict.bits_per_weight:.3f} bits per weight")
    table.add_row("tokens", f"{verdict.tokens:,}")
    if verdict.reference:
        table.add_row("compared with", verdict.reference)
    base = "source" if verdict.reference else "float"
    table.add_row(
        f"KL to {base}", f"{verdict.kl_mean:.5f}  (95 %: {low:.5f} .. {high:.5f}; p99 {verdict.kl_p99:.4f}, max {verdict.kl_max:.3f})"
    )
    if verdict.kl_floor is not None:
        table.add_row("  of it the runtime's own", f"{verdict.kl_floor:.2e}  (the {base} file in the same runtime)")
    ratio_low, ratio_high = verdict.ppl_ratio_ci95
    ratio = f"ratio {verdict.ppl_ratio:.4f} (95 %: {ratio_low:.4f} .. {ratio_high:.4f})"
    table.add_row("perplexity", f"{verdict.ppl:.4f} against {verdict.ppl_base:.4f}: {ratio}")
    table.add_row("same top token", f"{100 * verdict.top1_agreement:.2f} %")
    table.add_row("largest logit difference", f"{verdict.max_logit_diff:.3g}")
    console.print(table)
    if verdict.domains:
        _domains(verdict, predicted)
    judged(verdict.failures, any(value is not None for value in vars(verdict.thresholds).values()))
    if how_close := closeness(verdict):
        console.print(f"[bold {_COLOURS[how_close.look]}]{how_close.word.lower()}:[/] {how_close.said}")


def _domains(verdict: Verdict, predicted: Mapping[str, float]) -> None:
    forecast = ("predicted",) if predicted else ()
    table = new_table("by kind of text", ("kind", "tokens", *forecast, "KL", "95 %", "perplexity ratio", "top-1"))
    for each in sorted(verdict.domains, key=lambda each: -each.kl_mean):
        low, high = each.kl_ci95
        expected = (f"{predicted[each.name]:.5f}" if each.name in predicted else "",) if predicted else ()
        figures = f"{each.kl_mean:.5f}", f"{low:.5f} .. {high:.5f}", f"{each.ppl_ratio:.4f}", f"{100 * each.top1_agreement:.2f} %"
        table.add_row(escape(each.name), f"{each.tokens:,}", *expected, *figures)
    console.print(table)
    doubt = f"; {', '.join(verdict.perhaps_worse)} may be as bad: the intervals overlap" if verdict.perhaps_worse else ""
    console.print(f"worst on {escape(f'{verdict.worst_domain}{doubt}')}", soft_wrap=True)


def _embeddings(verdict: EmbeddingVerdict) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    low, high = verdict.cosine_ci95
    table.add_row("runtime", f"{verdict.runtime} ({verdict.runtime_version})")
    table.add_row("size", f"{size(verdict.bytes)}, {verdict.bits_per_weight:.3f} bits per weight")
    table.add_row("texts", f"{verdict.texts:,} of {verdict.tokens:,} tokens")
    compared = _POOLED[verdict.pooling] if verdict.pooling else "every token: the file does not say how a text is pooled"
    table.add_row("compared", compared)
    if verdict.reference:
        table.add_row("of", verdict.reference)
    base = "source" if verdict.reference else "float"
    table.add_row(f"cosine to {base}", f"{verdict.cosine_mean:.5f}  (95 %: {low:.5f} .. {high:.5f}; the least {verdict.cosine_least:.5f})")
    if verdict.cosine_floor is not None:
        table.add_row(f"  of the {base} file", f"{verdict.cosine_floor:.5f}  (in the same runtime)")
    table.add_row("relative error", f"{verdict.relative_error:.2e}")
    console.print(table)
    judged(verdict.failures, verdict.thresholds.min_cosine is not None)
