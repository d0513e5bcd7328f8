"""The files of a demonstration: size against measured error, by runtime."""

from __future__ import annotations

from fewbits.reporting.page.contents import Results
from fewbits.reporting.page.markup import figure, legend, table
from fewbits.reporting.page.sections import Section
from fewbits.reporting.page.words import kl, share, size

_FLOAT = "float"  # what a demonstration calls the weights as they are: their error is a thousandth of any other's, or less


def section(found: Results) -> Section | None:
    if not found.files:
        return None
    points = [
        {
            "name": row.format, "target": row.target, "runtime": row.verdict.runtime, "bytes": row.verdict.bytes,
            "bits": row.verdict.bits_per_weight, "kl": row.verdict.kl, "same": row.verdict.agreement, "planned": row.format.endswith("bpw"),
        }
        for row in found.files if row.format != _FLOAT and row.verdict.kl > 0
    ]  # fmt: skip
    rows = [
        (
            row.file, row.target, row.verdict.runtime, size(row.verdict.bytes), f"{row.verdict.bits_per_weight:.2f}", kl(row.verdict.kl),
            share(row.verdict.agreement, 2), f"{row.verdict.ppl_ratio:.4f}", "yes" if row.agrees else "no",
        )
        for row in found.files
    ]  # fmt: skip
    columns = ("file", "target", "runtime", "size", "bits/weight", "KL", "same token", "perplexity ratio", "computes what it says")
    runtimes = dict.fromkeys(str(row["runtime"]) for row in points)
    keys = [(f"series-{number}", name) for number, name in enumerate(runtimes, 1)]
    keys += [("diamond", "planned to a size"), ("ring", "one format for all weights")]
    caption = "Each mark is a file that was run. The float files are in the table: they would lie far down to the right."
    return Section(
        "files",
        "All files",
        "The further down and to the left, the better. A planned file is to be compared with the file of one format that has its size.",
        (
            figure("files", "Size of each file against its measured KL divergence", caption, legend(keys)),
            table(columns, rows, "Every file, as measured in its runtime", (3, 4, 5, 6, 7)),
        ),
        {"files": points},
    )
