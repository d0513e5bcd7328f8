"""The model card of an .onnx file that was made of another: what was measured, its formats, how to run it, the command that made it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.targets import card
from fewbits.targets.running import Command

if TYPE_CHECKING:
    from fewbits.onnx_graphs.outputs import FileVerdict
    from fewbits.planning import Plan


def write(path: Path, source: Path, inputs: Sequence[str], plan: Plan, verdict: FileVerdict | None, command: str) -> Path:
    """`inputs`: the names that the graph takes."""
    command = card.without_paths(command)
    about = {
        "quantized_by": card.MAKER,
        "library_name": "onnxruntime",
        "tags": [card.MAKER, "quantized", "onnx"],
        "fewbits_command": command,
    }
    formats = Counter(entry.format for entry in plan.entries)
    parts = [
        card.front_matter(about),
        f"# {path.stem}, {plan.bits_per_weight:.2f} bits per weight",
        f"`{source.name}`, its weights packed to {plan.bits_per_weight:.2f} bits each with fewbits.",
        *_measured(verdict),
        "## The plan",
        card.table(("format", "weights"), [(name, str(count)) for name, count in formats.most_common()]),
        *card.how_it_is_run([_run(path, inputs)]),
        "## How it was made",
        f"```sh\n{command}\n```",
    ]
    return card.save(path, parts)


def _measured(verdict: FileVerdict | None) -> list[str]:
    if verdict is None:
        return ["## Measured", "The file was not run: nothing is known of how close it is to its source."]
    said = f"{verdict.bytes:,} bytes, the float file {verdict.bytes_float:,}; in {verdict.runtime} on {verdict.samples} samples of "
    rows = [(each.name, f"{each.cosine:.5f}", f"{each.cosine_least:.5f}", f"{each.relative_error:.2e}") for each in verdict.outputs]
    return [
        "## Measured",
        f"{said}{Path(verdict.inputs).name}.",
        card.table(("output", "cosine to float", "least of a sample", "relative error"), rows),
    ]


def _run(path: Path, inputs: Sequence[str]) -> Command:
    given = ", ".join(f"{name!r}: ..." for name in inputs)
    lines = ("import onnxruntime", f"session = onnxruntime.InferenceSession({path.name!r})", f"outputs = session.run(None, {{{given}}})")
    return Command("its outputs, in Python", "\n".join(lines), "python")
