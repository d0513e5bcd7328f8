"""Which kernels multiply the formats of this file, and how near they come to what the machine allows, if that was measured."""

from __future__ import annotations

from typing import Any

from fewbits.reporting.page.contents import Made, Results, Row
from fewbits.reporting.page.markup import Html, behind, code, figure, joined, legend, table, tag
from fewbits.reporting.page.reading import number, text, whole
from fewbits.reporting.page.sections import Section
from fewbits.reporting.page.words import count, share, size


def section(found: Results) -> Section | None:
    made = found.made
    if made is None or not made.kernels:
        return None
    rows = [(row.format, row.backend, str(row.weights), size(row.bytes)) for row in made.kernels]
    body: list[Html] = [table(("format", "kernel", "weights", "bytes"), rows, "Kernels for the formats of this file", (2, 3))]
    data: dict[str, Any] = {}
    if found.bench is not None:
        reached = _reached(found.bench, made)
        body += _pictures(found.bench, reached)
        data = {"reached": reached}
    else:
        command = code("fewbits bench kernels -o BENCH")
        body.append(
            tag("p", "No speeds were given. ", command, " measures them; ", code("fewbits report --bench BENCH"), " shows them here.")
        )
    judge = f" The figures above come from {made.verdict.runtime}, which has kernels of its own." if made.verdict else ""
    about = f"What multiplies each format in fewbits' own runtime, on the machine where the file was made.{judge}"
    return Section("kernels", "Kernels", about, tuple(body), data)


def _reached(bench: Row, made: Made) -> list[dict[str, Any]]:
    """Of the formats of this file; of all where none of them was measured."""
    own = {weight.format for weight in made.weights}
    found = []
    for case in bench["cases"]:
        ours = case["results"][0]
        found.append(
            {
                "format": text(case["format"]), "rows": whole(case["rows"]), "shape": f"{whole(case['k'])} \u00d7 {whole(case['n'])}",
                "share": number(ours["share_of_limit"]["median"]), "bound": text(ours["bound"]),
                "gigabytes": number(ours["gigabytes_per_second"]), "operations": number(ours["gigaoperations_per_second"]),
            }
        )  # fmt: skip
    known = [row for row in found if row["share"] == row["share"]]
    return [row for row in known if row["format"] in own] or known


def _pictures(bench: Row, reached: list[dict[str, Any]]) -> list[Html]:
    processor = text(bench["machine"]["processor"])
    threads = whole(bench["limits"]["threads"])
    where = f"{processor} with {count(threads, 'thread')}"
    caption = f"Share of the limit that is reached first, memory or arithmetic, on {where}."
    keys = (("one", "one row, as when generating"), ("many", "many rows, as when reading a prompt"))
    rows = [
        (
            row["format"], str(row["rows"]), row["shape"], share(row["share"], 0), row["bound"], f"{row['gigabytes']:.1f}",
            f"{row['operations']:.0f}",
        )
        for row in reached
    ]  # fmt: skip
    columns = ("format", "rows of x", "weight", "of the limit", "limit", "GB/s", "GOP/s")
    label = "Share of the machine's limit that each product reaches"
    shown = table(columns, rows, "Products under the roofline", (1, 3, 5, 6))
    return [figure("reached", label, caption, legend(keys)), joined([behind("These products as a table", shown)])]
