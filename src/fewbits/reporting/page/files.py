"""The files of a demonstration: size against measured error, by runtime."""

from __future__ import annotations

from fewbits.reporting.page.markup import Section, figure, legend, table
from fewbits.reporting.page.words import kl, share, size
from fewbits.reporting.schema import Demonstration

_FLOAT = "float"  # what a demonstration calls the weights as they are: their error is a thousandth of any other's, or less


def section(demo: Demonstration) -> Section | None:
    if not demo.rows:
        return None
    points = [
        {
            "name": row.format, "target": row.target, "runtime": row.runtime, "bytes": row.bytes,
            "bits": row.bits_per_weight, "kl": row.kl_mean, "same": row.top1_agreement, "planned": row.format.endswith("bpw"),
        }
        for row in demo.rows if row.format != _FLOAT and row.kl_mean > 0
    ]  # fmt: skip
    rows = [
        (
            row.file, row.target, row.runtime, size(row.bytes), f"{row.bits_per_weight:.2f}", kl(row.kl_mean),
            share(row.top1_agreement, 2), f"{row.ppl_ratio:.4f}", "yes" if row.crosscheck["agrees"] else "no",
        )
        for row in demo.rows
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
