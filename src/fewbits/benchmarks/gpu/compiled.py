"""What `fewbits bench kernels --backend triton --compile-only` shows: every kernel compiled for every architecture, and the roofline
beside it, as lines of Markdown that are the same on the screen and in docs/kernels.md.

    python -m fewbits.benchmarks.gpu.compiled [PAGE.md] [WORDS]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fewbits.errors import InputError, MissingError
from fewbits.formats import Shape
from fewbits.kernels.triton import missing as triton_missing
from fewbits.kernels.triton import tile_shapes
from fewbits.kernels.triton.tooling import roofline
from fewbits.kernels.triton.tooling.compiler import CompiledKernel, compile_all
from fewbits.kernels.triton.tooling.gpus import ALL


def jobs(architectures: Sequence[str] = tile_shapes.ARCHITECTURES, only: Sequence[str] = ()) -> list[tuple[str, str]]:
    """(case, architecture): all cases, or those that have one of these words, a format or a kernel, in their names."""
    if reason := triton_missing():
        raise MissingError(f"no kernels to compile: {reason}", "the wheels of Triton bring its compiler; no GPU is needed")
    from fewbits.kernels.triton.tooling import cases

    if unknown := [name for name in architectures if name not in tile_shapes.ARCHITECTURES]:
        raise InputError(f"no kernels are compiled for `{unknown[0]}`", f"known architectures: {', '.join(tile_shapes.ARCHITECTURES)}")
    names = [name for name in cases.all() if not only or any(word in name.split() for word in only)]
    if not names:
        raise InputError(f"no kernel has `{', '.join(only)}` in its name", f"for example: {', '.join(cases.FORMATS)}")
    return [(name, architecture) for architecture in architectures for name in names]


def compiled_table(rows: Sequence[CompiledKernel]) -> list[str]:
    lines = [
        "| kernel | architecture | registers | spills | shared | warps | resident | tensor cores | load | bytes/weight | instr./weight | |",
        "|---|---|---:|---:|---:|---:|---:|---|---:|---:|---:|---|",
    ]
    for row in rows:
        cells = (
            row.case, row.architecture, row.registers, row.spills, row.shared, row.warps, row.resident, _short(row.tensor),
            "" if row.narrowest_load is None else row.narrowest_load, "" if row.bytes_per_weight is None else f"{row.bytes_per_weight:.3f}",
            "" if row.instructions is None else f"{row.instructions:.1f}", row.problem or "",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def summary_table(rows: Sequence[CompiledKernel]) -> list[str]:
    """One line per kernel: over all architectures, the most registers and shared memory, the fewest resident warps, the narrowest load."""
    lines = [
        "| kernel | architectures | registers | shared | resident warps | load | bytes/weight |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(row.case for row in rows):
        same = [row for row in rows if row.case == name]
        loads = [row.narrowest_load for row in same if row.narrowest_load is not None]
        weight = same[0].bytes_per_weight
        spans = (_span([row.registers for row in same]), _span([row.shared for row in same]), _span([row.resident for row in same]))
        cells = (name, len(same), *spans, _span(loads) if loads else "", "" if weight is None else f"{weight:.3f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def roofline_table(formats: Sequence[str], shape: Shape, tokens: Sequence[int]) -> list[str]:
    """Expected microseconds, one line per GPU and format; the last column: tokens from which compute is the bound."""
    lines = [
        f"| GPU | format | {' | '.join(f'{count} tok.' for count in tokens)} | compute from |",
        f"|---|---|{'---:|' * len(tokens)}---:|",
    ]
    for gpu in ALL:
        for name in formats:
            times = " | ".join(f"{roofline.expected(gpu, name, shape, count).microseconds:.1f}" for count in tokens)
            lines.append(f"| {gpu.name} | {name} | {times} | {roofline.crossover(gpu, name, shape)} |")
    return lines


def _short(names: Sequence[str]) -> str:
    """Without the words that say nothing about the shape and types of the operands."""
    said_by_all = r"\.(?:sync\.aligned|cta_group::1|row\.col|satfinite)"
    return ", ".join(dict.fromkeys(re.sub(said_by_all, "", name) for name in names))


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}..{high}"


def fill(page: str, rows: Sequence[CompiledKernel]) -> str:
    """The page with new tables between `<!-- compiled` or `<!-- roofline` and their ends."""
    one_token = [row for row in rows if row.case.startswith("product") and row.case.endswith("float16 1")]
    tables = {
        "compiled": [*summary_table(rows), "", "Instructions per weight of a product of one token:", "", *instruction_table(one_token)],
        "roofline": roofline_table(("int4_g128", "q4_k", "q6_k", "q8_0"), (14336, 4096), (1, 16, 64, 512)),
    }
    for name, lines in tables.items():
        head, mark, rest = page.partition(f"<!-- {name}")
        start, end, tail = rest.partition(f"<!-- end of {name} -->")
        if not end:
            raise InputError(f"the page has no `<!-- {name} -->` and `<!-- end of {name} -->`", "put them where the table belongs")
        page = head + mark + start.splitlines()[0] + "\n" + "\n".join(lines) + "\n" + end + tail
    return page


def instruction_table(rows: Sequence[CompiledKernel]) -> list[str]:
    counted = [row for row in rows if row.instructions is not None]
    architectures = sorted({row.architecture for row in counted}, key=lambda name: int(name[3:]))
    lines = [f"| format | {' | '.join(architectures)} |", f"|---|{'---:|' * len(architectures)}"]
    for name in dict.fromkeys(row.case.split()[1] for row in counted):
        by_architecture = {row.architecture: row.instructions for row in counted if row.case.split()[1] == name}
        cells = (f"{number:.1f}" if (number := by_architecture.get(each)) else "" for each in architectures)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main(words: Sequence[str]) -> int:
    """Compiles all kernels, or those with one of the words in their names; writes tables into the page, or prints them. 1 if one has a
    problem."""
    page = Path(words[0]) if words and words[0].endswith(".md") else None
    rows = []
    for row in compile_all(jobs(only=words[1:] if page else words)):  # minutes in all
        sys.stderr.write(f"{row.case} on {row.architecture}: {row.problem or 'good'}, {row.seconds:.1f} s\n")
        rows.append(row)
    if page:
        page.write_text(fill(page.read_text(), rows))
    else:
        sys.stdout.write("\n".join(compiled_table(rows)) + "\n")
    return 1 if any(row.problem for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
