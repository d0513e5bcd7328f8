"""Files beside each other, as `fewbits compare FILE... --against MODEL` shows them: the smallest first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from fewbits.reporting.terminal import console, size
from fewbits.reporting.terminal.tables import Column, fitted

if TYPE_CHECKING:
    from fewbits.verification.comparison.figures import ComparedFile, Comparison, Difference

_COLUMNS = (
    Column("file", least=16), Column("bytes", right=True), Column("bits/w", rank=5, right=True), Column("KL", right=True),
    Column("95 %", rank=8), Column("above the best, paired 95 %", rank=7), Column("top-1", rank=3, right=True),
    Column("ppl ratio", rank=4, right=True), Column("tokens/s", rank=6, right=True), Column("runtime", rank=9), Column("frontier"),
)  # fmt: skip


def show(compared: Comparison) -> None:
    against = compared.reference or compared.model
    title = f"{len(compared.compared)} files beside {against}, on the same {compared.tokens:,} tokens"
    console.print(fitted(escape(title), _COLUMNS, [_row(file) for file in compared.compared], console.width))
    if any(file.verdict.domains for file in compared.compared):
        _by_kind(compared)
    for file in compared.compared:
        if file.beaten_by:
            console.print(escape(beaten(file.name, file.beaten_by)), soft_wrap=True)
        for failure in file.verdict.failures:
            console.print(f"[bold red]failed:[/] {escape(f'{file.name}: {failure}')}", soft_wrap=True)
    if any(file.tokens_per_second for file in compared.compared):
        console.print(escape(f"tokens/s: generating, on this machine ({compared.machine}), as busy as it was"), soft_wrap=True)
    for each in compared.refused:
        console.print(f"[yellow]left out:[/] {escape(f'{each.file}: {each.reason}')}", soft_wrap=True)


def beaten(name: str, by: Difference) -> str:
    """Said of a file that is not on the frontier."""
    low, high = by.ci95
    doubt = "" if by.sure else "; too little to be told from chance"
    return f"{name}: {by.to} is no larger and closer, by {by.kl:.5f} of KL (95 %: {low:.5f} .. {high:.5f}{doubt})"


def _row(file: ComparedFile) -> tuple[str, ...]:
    verdict = file.verdict
    low, high = verdict.kl_ci95
    above = "the best" if file.to_best is None else "{:.5f} ({:.5f} .. {:.5f})".format(file.to_best.kl, *file.to_best.ci95)
    speed = "" if file.tokens_per_second is None else f"{file.tokens_per_second:.1f}"
    return (
        escape(file.name), size(verdict.bytes), f"{verdict.bits_per_weight:.2f}", f"{verdict.kl_mean:.5f}", f"{low:.5f} .. {high:.5f}",
        above, f"{100 * verdict.top1_agreement:.2f} %", f"{verdict.ppl_ratio:.4f}", speed, verdict.runtime,
        "[green]yes[/]" if file.on_frontier else "no",
    )  # fmt: skip


def _by_kind(compared: Comparison) -> None:
    kinds = [each.name for each in compared.compared[0].verdict.domains]
    columns = [Column("file", least=16), *(Column(escape(kind), right=True, rank=index) for index, kind in enumerate(kinds))]
    rows = []
    for file in compared.compared:
        known = {each.name: each.kl_mean for each in file.verdict.domains}
        rows.append([escape(file.name), *(f"{known[kind]:.5f}" for kind in kinds)])
    console.print(fitted("KL by kind of text", columns, rows, console.width))
