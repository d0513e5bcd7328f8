"""An .onnx file that was made of another: what it holds, and how far its outputs are from the float file's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from fewbits.reporting.terminal import console, judged, plans, size
from fewbits.targets import card

if TYPE_CHECKING:
    from fewbits.onnx_graphs.outputs import FileVerdict
    from fewbits.onnx_graphs.verbs import QuantizedFile


def quantized(result: QuantizedFile) -> None:
    plans.summary(result.plan)
    if result.verdict:
        verdict(result.verdict)
    console.print(f"wrote {escape(str(result.path))}; its plan is {escape(str(result.plan_path))}")
    console.print(f"the model card: {escape(str(card.place(result.path)))}")


def verdict(result: FileVerdict) -> None:
    console.print(
        f"{result.runtime} on {result.samples} samples of {escape(result.inputs)}: {size(result.bytes)}, float {size(result.bytes_float)}"
    )
    table = Table(box=None, header_style="dim")
    for column in ("output", "cosine", "least of a sample", "relative error", "largest difference"):
        table.add_column(column, justify="left" if column == "output" else "right")
    for each in result.outputs:
        figures = (f"{each.cosine:.5f}", f"{each.cosine_least:.5f}", f"{each.relative_error:.2e}", f"{each.max_abs_diff:.3g}")
        table.add_row(escape(each.name), *figures)
    console.print(table)
    judged(result.failures, result.min_cosine is not None or result.max_error is not None)
