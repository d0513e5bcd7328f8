"""An .onnx file that was made of another: what it holds, and how far its outputs are from the float file's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from fewbits.reporting.terminal import console, plan_summary, size

if TYPE_CHECKING:
    from fewbits.onnx_files.command import QuantizedFile
    from fewbits.onnx_files.verifying import FileVerdict


def quantized(result: QuantizedFile) -> None:
    plan_summary(result.plan)
    if result.verdict:
        verdict(result.verdict)
    console.print(f"wrote {escape(str(result.path))}; its plan is {escape(str(result.plan_path))}")


def verdict(found: FileVerdict) -> None:
    console.print(
        f"{found.runtime} on {found.samples} samples of {escape(found.inputs)}: {size(found.bytes)}, float {size(found.bytes_float)}"
    )
    table = Table(box=None, header_style="dim")
    for column in ("output", "cosine", "least of a sample", "relative error", "largest difference"):
        table.add_column(column, justify="left" if column == "output" else "right")
    for each in found.outputs:
        figures = (f"{each.cosine:.5f}", f"{each.cosine_least:.5f}", f"{each.relative_error:.2e}", f"{each.max_abs_diff:.3g}")
        table.add_row(escape(each.name), *figures)
    console.print(table)
    asked = found.min_cosine is not None or found.max_error is not None
    for failure in found.failures:
        console.print(f"[red]failed[/]: {escape(failure)}")
    if found.passed:
        console.print("[green]passed[/]" if asked else "ran, no threshold was asked for")
