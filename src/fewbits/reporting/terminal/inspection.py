"""What `fewbits formats`, `inspect` and `compare` show: formats, the tensors of a file, and errors of formats, ranges and KV caches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.markup import escape

from fewbits.reporting.terminal import console, note, size
from fewbits.reporting.terminal.tables import Column, fitted

if TYPE_CHECKING:
    from fewbits.formats import Format
    from fewbits.inspection.contents import Inspection
    from fewbits.inspection.formats import Comparison
    from fewbits.inspection.ranges import RangeComparison
    from fewbits.verification.kv import KvComparison


def formats(rows: Iterable[tuple[Format, float, str, str]]) -> None:
    columns = (
        Column("name"), Column("bits/w", right=True), Column("per", 3, right=True), Column("targets", 1, least=14),
        Column("kernel", 4), Column("what it is", 2, least=24),
    )  # fmt: skip
    cells = []
    for fmt, bits, targets, kernel in rows:
        shared = "-" if fmt.is_cast else str(fmt.group) if fmt.group else "tensor" if fmt.tensor_wide else "row"
        cells.append((fmt.name, f"{bits:.4g}", shared, targets or "none yet", kernel.removeprefix("native-"), escape(fmt.about)))
    console.print(fitted("formats", columns, cells, console.width))


def tensors(file: Inspection) -> None:
    amount = f"{len(file.tensors)} tensors of {size(file.tensor_bytes)}"
    console.print(f"[bold]{escape(file.path)}[/]: {file.kind}, {size(file.nbytes)} on disk, {amount}")
    for key, value in file.metadata.items():
        text, room = str(value).replace("\n", " "), max(20, min(96, console.width - len(key) - 4))
        console.print(f"  {escape(key)}: {escape(text if len(text) <= room else text[: room - 3] + '...')}", soft_wrap=True)
    columns = (
        Column("tensor"), Column("type"), Column("shape", 1), Column("std", 3, right=True), Column("peak", 4, right=True),
        Column("-4 .. 4 std", 2),
    )  # fmt: skip
    cells = []
    for t in file.tensors:
        shape = "x".join(map(str, t.shape)) or "scalar"
        v = t.values
        seen = (f"{v.std:.2g}", f"{v.peak:.1f}", v.picture) if v else ("", "", "")
        cells.append((escape(t.name.removesuffix(".weight")), escape(t.type), shape, *seen))
    read = any(t.values for t in file.tensors)
    console.print(fitted(None, columns if read else columns[:3], [row if read else row[:3] for row in cells], console.width))
    _types(file)
    for t in file.tensors:
        if t.values and t.values.nonfinite:
            values = "a value that is" if t.values.nonfinite == 1 else f"{t.values.nonfinite:,} values that are"
            note(f"`{t.name}` holds {values} not finite: quantizing will refuse it")


def _types(file: Inspection) -> None:
    """Totals per type."""
    columns = (
        Column("type"), Column("tensors", 2, right=True), Column("numbers", 1, right=True), Column("bytes", right=True),
        Column("bits per number", 3, right=True),
    )  # fmt: skip
    cells = [
        (escape(each.type), f"{each.tensors:,}", f"{each.numbers:,}", size(each.nbytes), f"{8 * each.nbytes / max(1, each.numbers):.4g}")
        for each in file.types
    ]
    console.print(fitted("by type", columns, cells, console.width))


def format_errors(result: Comparison) -> None:
    title = f"relative RMS error, {result.bits} bits, max scaling; x less: than per tensor"
    columns = (
        Column("weight"), Column("per tensor", 3, right=True), Column("per channel", 2, right=True), Column("x less", 1, right=True),
        Column("per 64", right=True), Column("x less", right=True),
    )  # fmt: skip
    cells = []
    for g in result.weights:
        group = (f"{g.per_group:.4f}", f"{g.group_ratio:.2f}") if g.per_group and g.group_ratio else ("does not divide", "")
        cells.append((escape(g.weight), f"{g.per_tensor:.4f}", f"{g.per_channel:.4f}", f"{g.channel_ratio:.2f}", *group))
    console.print(fitted(title, columns, cells, console.width))
    base = next((row.error for row in result.formats if row.format == "q4_0"), None)
    by_format = (
        Column("format"), Column("bits/w", right=True), Column("error max", 2, right=True), Column("search", right=True),
        Column("to q4_0", 1, right=True), Column("decode Gw/s", 3, right=True), Column("kernel", 4), Column("left out", 5, right=True),
    )  # fmt: skip
    figures: list[tuple[str, ...]] = []
    for row in result.formats:
        errors = [f"{e:.5f}" if e is not None else "fits none" for e in (row.error_max, row.error)]
        ratio = f"{row.error / base:.2f}x" if base and row.error is not None else ""
        speed = f"{row.gigaweights_per_second:.2f}"
        kernel = row.kernel.removeprefix("native-")
        figures.append((row.format, f"{row.bits_per_weight:.4g}", *errors, ratio, speed, kernel, str(row.left_out or "")))
    console.print(fitted("the same weights by format: relative RMS error, decode speed", by_format, figures, console.width))


def range_errors(result: RangeComparison) -> None:
    best, by_input = result.best(), result.by_input()
    methods = [row.method for row in next(iter(by_input.values()))]
    short = [method.removeprefix("percentile_").replace("moving_", "") for method in methods]
    columns = [Column("input"), *(Column(name, rank, right=True) for rank, name in enumerate(short, 1))]
    cells = [
        (escape(".".join(name.split(".")[-3:])),
         *(f"[bold]{row.error:.1e}*[/]" if row.method == best[name] else f"{row.error:.1e}" for row in rows))
        for name, rows in by_input.items()
    ]  # fmt: skip
    title = f"squared error of {result.levels} over the mean square, by estimator; * the least"
    console.print(fitted(title, columns, cells, console.width))
    columns = [
        Column("estimator"), Column("least error on", 1, right=True), Column("error", right=True), Column("clipped share", 2, right=True),
        Column("KL of histograms", 3, right=True),
    ]  # fmt: skip
    means = []
    for method in methods:
        rows = [row for row in result.rows if row.method == method]
        each = [sum(getattr(row, field) for row in rows) / len(rows) for field in ("error", "clipped", "kl")]
        means.append((method, str(list(best.values()).count(method)), *(f"{mean:.1e}" for mean in each)))
    console.print(fitted("mean over inputs", columns, means, console.width))


def kv_caches(result: KvComparison) -> None:
    columns = (
        Column("format"), Column("context", right=True), Column("bits/value", 2, right=True), Column("KL", right=True),
        Column("perplexity ratio", 1, right=True), Column("95 %", 3),
    )  # fmt: skip
    cells = []
    for row in result.rows:
        low, high = row.ppl_ratio_ci95
        ratio = f"{row.ppl_ratio:.5f}"
        cells.append((row.format, str(row.length), f"{row.bits_per_value:.2f}", f"{row.kl:.2e}", ratio, f"{low:.5f} .. {high:.5f}"))
    console.print(fitted("KV cache in torch, against the float cache", columns, cells, console.width))
