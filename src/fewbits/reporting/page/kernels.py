"""Which kernels multiply the formats of this file, and how near they come to what the machine allows, if that was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fewbits.reporting.page.checked_json import number, text, whole
from fewbits.reporting.page.markup import Html, Section, behind, code, figure, legend, table, tag
from fewbits.reporting.page.words import count, share, size
from fewbits.reporting.schema import Results


def section(made: Results, bench: Mapping[str, Any] | None) -> Section | None:
    """`bench`: what `fewbits bench kernels` wrote."""
    if not made.kernels:
        return None
    rows = [(row.format, row.backend, str(row.weights), size(row.bytes)) for row in made.kernels]
    body: list[Html] = [table(("format", "kernel", "weights", "bytes"), rows, "Kernels for the formats of this file", (2, 3))]
    data: dict[str, Any] = {}
    if bench is not None:
        data = {"reached": _reached(bench, made)}
        body += _pictures(bench, data["reached"])
    else:
        measure, show = code("fewbits bench kernels -o BENCH"), code("fewbits report --bench BENCH")
        body.append(tag("p", "No speeds were given. ", measure, " measures them; ", show, " shows them here."))
    judge = f" The figures above come from {made.verdict.runtime}, which has kernels of its own." if made.verdict else ""
    about = f"What multiplies each format in fewbits' own runtime, on the machine where the file was made.{judge}"
    return Section("kernels", "Kernels", about, tuple(body), data)


def _reached(bench: Mapping[str, Any], made: Results) -> list[dict[str, Any]]:
    """Of the formats of this file; of all where none of them was measured."""
    formats = {weight.format for weight in made.plan.weights.values()}
    measured: list[dict[str, Any]] = []
    for case in bench["cases"]:
        ours = case["results"][0]
        measured.append(
            {
                "format": text(case["format"]), "rows": whole(case["rows"]), "shape": f"{whole(case['k'])} \u00d7 {whole(case['n'])}",
                "share": number(ours["share_of_limit"]["median"]), "bound": text(ours["bound"]),
                "gigabytes": number(ours["gigabytes_per_second"]), "operations": number(ours["gigaoperations_per_second"]),
            }
        )  # fmt: skip
    known = [row for row in measured if not math.isnan(row["share"])]
    return [row for row in known if row["format"] in formats] or known


def _pictures(bench: Mapping[str, Any], reached: list[dict[str, Any]]) -> list[Html]:
    where = f"{text(bench['machine']['processor'])} with {count(whole(bench['limits']['threads']), 'thread')}"
    caption = f"Share of the limit that is reached first, memory or arithmetic, on {where}."
    keys = (("one", "one row, as when generating"), ("many", "many rows, as when reading a prompt"))
    rows = [
        (r["format"], str(r["rows"]), r["shape"], share(r["share"], 0), r["bound"], f"{r['gigabytes']:.1f}", f"{r['operations']:.0f}")
        for r in reached
    ]
    columns = ("format", "rows of x", "weight", "of the limit", "limit", "GB/s", "GOP/s")
    label = "Share of the machine's limit that each product reaches"
    shown = table(columns, rows, "Products under the roofline", (1, 3, 5, 6))
    return [figure("reached", label, caption, legend(keys)), behind("These products as a table", shown)]
