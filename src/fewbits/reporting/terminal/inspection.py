"""What `fewbits formats`, `inspect` and `compare` show: formats, the tensors of a file, and errors of formats, ranges and KV caches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.markup import escape

from fewbits.reporting.terminal import console, new_table, note, size

if TYPE_CHECKING:
    from fewbits.formats import Format
    from fewbits.inspection.contents import Inspection
    from fewbits.inspection.formats import Comparison
    from fewbits.inspection.ranges import RangeComparison
    from fewbits.verification.kv import KvComparison


def formats(rows: Iterable[tuple[Format, float, str, str]]) -> None:
    table = new_table("formats", ("name", "bits/w", "per", "targets", "kernel", "what it is"))
    for fmt, bits, targets, kernel in rows:
        shared = "-" if fmt.is_cast else str(fmt.group) if fmt.group else "tensor" if fmt.tensor_wide else "row"
        table.add_row(fmt.name, f"{bits:.4g}", shared, targets or "none yet", kernel.removeprefix("native-"), fmt.about)
    console.print(table)


def tensors(file: Inspection) -> None:
    amount = f"{len(file.tensors)} tensors of {size(file.tensor_bytes)}"
    console.print(f"[bold]{escape(file.path)}[/]: {file.kind}, {size(file.nbytes)} on disk, {amount}")
    for key, value in file.metadata.items():
        text = str(value).replace("\n", " ")
        console.print(f"  {escape(key)}: {escape(text if len(text) <= 96 else text[:93] + '...')}", soft_wrap=True)
    table = new_table(None, ("tensor", "type", "shape", "std", "peak", "-4 .. 4 std"))
    for t in file.tensors:
        shape = "x".join(map(str, t.shape)) or "scalar"
        v = t.values
        seen = (f"{v.std:.2g}", f"{v.peak:.1f}", v.picture) if v else ("", "", "")
        table.add_row(escape(t.name.removesuffix(".weight")), t.type, shape, *seen)
    console.print(table)
    for t in file.tensors:
        if t.values and t.values.nonfinite:
            values = "a value that is" if t.values.nonfinite == 1 else f"{t.values.nonfinite:,} values that are"
            note(f"`{t.name}` holds {values} not finite: quantizing will refuse it")


def format_errors(result: Comparison) -> None:
    title = f"relative RMS error, {result.bits} bits, max scaling; x less: than per tensor"
    table = new_table(title, ("weight", "per tensor", "per channel", "x less", "per 64", "x less"))
    for g in result.weights:
        group = (f"{g.per_group:.4f}", f"{g.group_ratio:.2f}") if g.per_group and g.group_ratio else ("does not divide", "")
        table.add_row(escape(g.weight), f"{g.per_tensor:.4f}", f"{g.per_channel:.4f}", f"{g.channel_ratio:.2f}", *group)
    console.print(table)
    base = next((row.error for row in result.formats if row.format == "q4_0"), None)
    columns = ("format", "bits/w", "error max", "search", "to q4_0", "decode Gw/s", "kernel", "left out")
    table = new_table("the same weights by format: relative RMS error, decode speed", columns)
    for row in result.formats:
        errors = [f"{e:.5f}" if e is not None else "fits none" for e in (row.error_max, row.error)]
        ratio = f"{row.error / base:.2f}x" if base and row.error is not None else ""
        speed = f"{row.gigaweights_per_second:.2f}"
        table.add_row(
            row.format, f"{row.bits_per_weight:.4g}", *errors, ratio, speed, row.kernel.removeprefix("native-"), str(row.left_out or "")
        )
    console.print(table)


def range_errors(result: RangeComparison) -> None:
    best, by_input = result.best(), result.by_input()
    methods = [row.method for row in next(iter(by_input.values()))]
    short = [method.removeprefix("percentile_").replace("moving_", "") for method in methods]
    table = new_table(f"squared error of {result.levels} over the mean square, by estimator; * the least", ("input", *short))
    for name, rows in by_input.items():
        cells = [f"[bold]{row.error:.1e}*[/]" if row.method == best[name] else f"{row.error:.1e}" for row in rows]
        table.add_row(escape(".".join(name.split(".")[-3:])), *cells)
    console.print(table)
    table = new_table("mean over inputs", ("estimator", "least error on", "error", "clipped share", "KL of histograms"))
    for method in methods:
        rows = [row for row in result.rows if row.method == method]
        means = [sum(getattr(row, field) for row in rows) / len(rows) for field in ("error", "clipped", "kl")]
        table.add_row(method, str(list(best.values()).count(method)), *(f"{mean:.1e}" for mean in means))
    console.print(table)


def kv_caches(result: KvComparison) -> None:
    table = new_table("KV cache in torch, against the float cache", ("format", "context", "bits/value", "KL", "perplexity ratio", "95 %"))
    for row in result.rows:
        low, high = row.ppl_ratio_ci95
        bits = f"{row.bits_per_value:.2f}"
        table.add_row(row.format, str(row.length), bits, f"{row.kl:.2e}", f"{row.ppl_ratio:.5f}", f"{low:.5f} .. {high:.5f}")
    console.print(table)
