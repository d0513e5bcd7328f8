"""What `fewbits demo` shows: in words what came of it, and a table with a row for each file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fewbits.reporting.terminal import console, error, new_table, note, size

if TYPE_CHECKING:
    from fewbits.reporting.results.demonstration import Demo


def show(result: Demo) -> None:
    console.print(_in_words(result), soft_wrap=True)
    columns = ("format", "runtime", "bytes", "bits/w", "KL to float", "ppl ratio", "top-1", "as torch")
    table = new_table(f"the {result.model} model in each format, run by its runtime", columns)
    for row in result.rows:
        v = row.verdict
        half = (v.kl_ci95[1] - v.kl_ci95[0]) / 2
        kl = f"{v.kl_mean:.4f}±{half:.4f}" if v.kl_mean > 1e-3 else f"{v.kl_mean:.1e}"
        agrees = "[green]yes[/]" if row.crosscheck.agrees else "[bold red]NO[/]"
        figures = (size(v.bytes), f"{v.bits_per_weight:.2f}", kl, f"{v.ppl_ratio:.4f}", f"{100 * v.top1_agreement:.1f}%")
        table.add_row(row.format, v.runtime, *figures, agrees)
    console.print(table)
    measured = f"measured on {result.rows[0].verdict.tokens:,} held-out tokens by running each file in its runtime"
    console.print(f"{measured}; files and results.json are in {result.folder}/")
    console.print(f"the report: {result.folder}/report.html", soft_wrap=True)
    for row in result.rows:
        if row.plan.fallbacks:
            count, first = len(row.plan.fallbacks), row.plan.fallbacks[0]
            note(f"{row.format} for {row.target}: {count} weights stored otherwise; {first.weight} as {first.format}: {first.reason}")
        if not row.crosscheck.agrees:
            c = row.crosscheck
            error(f"{row.file} in {row.verdict.runtime} is {c.kl:.2e} (KL) from the same weights in torch; {c.limit:.2e} is explained")
    for reason in result.skipped:
        note(f"skipped {reason}")


def _in_words(result: Demo) -> str:
    """The result in one or two sentences."""
    who = " and ".join(sorted({row.verdict.runtime for row in result.rows}))
    wrong = [row.file for row in result.rows if not (row.verdict.passed and row.crosscheck.agrees)]
    if wrong:
        return f"[bold red]failed:[/] {', '.join(wrong)} did not compute in {who} what torch does with the same weights."
    words = f"[bold green]passed:[/] {len(result.rows)} files, each run in {who}, and each as torch computes with the same weights."
    planned = next((row for row in result.rows if row.format.endswith("bpw") and row.target == "gguf"), None)
    if planned is None:
        return words
    others = {row.format: row.verdict for row in result.rows if row.target == planned.target and not row.format.endswith("bpw")}
    best, whole = planned.verdict, others.pop("float")
    # the best of the formats that make a file as large
    peer = min(others, key=lambda name: (round(abs(others[name].bytes / best.bytes - 1), 2), others[name].kl_mean))
    return (
        f"{words}\nPlanned weight by weight, {size(best.bytes)} of {size(whole.bytes)} keep the float model's choice of the next token in "
        f"{100 * best.top1_agreement:.1f} % of places (KL {best.kl_mean:.4f}); {peer} for all, as large, in "
        f"{100 * others[peer].top1_agreement:.1f} % (KL {others[peer].kl_mean:.4f})."
    )
