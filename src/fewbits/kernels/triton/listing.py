"""What `fewbits bench kernels --backend triton --compile-only` shows: every kernel compiled for every architecture, and the roofline
beside it.

jobs(architectures, only), rows(jobs)      compiled one after the other
compiled_table(rows), roofline_table(...)  as lines of Markdown: the same on the screen and in docs/
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fewbits.errors import InputError, MissingError
from fewbits.formats import Shape
from fewbits.kernels.triton import missing as triton_missing
from fewbits.kernels.triton import roofline, tiles
from fewbits.kernels.triton.compiling import Row, compile_all
from fewbits.kernels.triton.gpus import ALL


def jobs(architectures: Sequence[str] = tiles.ARCHITECTURES, only: Sequence[str] = ()) -> list[tuple[str, str]]:
    """(case, architecture): all cases, or those that have one of these words, a format or a kernel, in their names."""
    if reason := triton_missing():
        raise MissingError(f"no kernels to compile: {reason}", "the wheels of Triton bring its compiler; no GPU is needed")
    from fewbits.kernels.triton import cases

    if unknown := [name for name in architectures if name not in tiles.ARCHITECTURES]:
        raise InputError(f"no kernels are compiled for `{unknown[0]}`", f"known architectures: {', '.join(tiles.ARCHITECTURES)}")
    names = [name for name in cases.all() if not only or any(word in name.split() for word in only)]
    if not names:
        raise InputError(f"no kernel has `{', '.join(only)}` in its name", f"for example: {', '.join(cases.FORMATS)}")
    return [(name, architecture) for architecture in architectures for name in names]


def rows(wanted: Sequence[tuple[str, str]], done: Callable[[Row], None] = lambda _: None) -> list[Row]:
    """`done` is told of each: minutes pass until the last."""
    found = []
    for row in compile_all(wanted):
        found.append(row)
        done(row)
    return found


def compiled_table(found: Sequence[Row]) -> list[str]:
    lines = [
        "| kernel | architecture | registers | spills | shared | warps | resident | tensor cores | load | bytes/weight | instr./weight | |",
        "|---|---|---:|---:|---:|---:|---:|---|---:|---:|---:|---|",
    ]
    for row in found:
        cells = (
            row.case, row.architecture, row.registers, row.spills, row.shared, row.warps, row.resident, _short(row.tensor),
            "" if row.narrowest_load is None else row.narrowest_load, "" if row.bytes_per_weight is None else f"{row.bytes_per_weight:.3f}",
            "" if row.instructions is None else f"{row.instructions:.1f}", row.problem or "",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def summary_table(found: Sequence[Row]) -> list[str]:
    """One line per kernel: over all architectures, the most registers and shared memory, the fewest resident warps, the narrowest load."""
    lines = [
        "| kernel | architectures | registers | shared | resident warps | load | bytes/weight |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(row.case for row in found):
        own = [row for row in found if row.case == name]
        loads = [row.narrowest_load for row in own if row.narrowest_load is not None]
        weight = own[0].bytes_per_weight
        cells = (
            name, len(own), _span([row.registers for row in own]), _span([row.shared for row in own]), _span([row.resident for row in own]),
            _span(loads) if loads else "", "" if weight is None else f"{weight:.3f}",
        )  # fmt: skip
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
    """Without the words that all have."""
    said_by_all = r"\.(?:sync\.aligned|cta_group::1|row\.col|satfinite)"
    return ", ".join(dict.fromkeys(re.sub(said_by_all, "", name) for name in names))


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}..{high}"


def fill(page: str, found: Sequence[Row]) -> str:
    """The page with its tables made anew, between the marks that they stand between."""
    one_token = [row for row in found if row.case.startswith("product") and row.case.endswith("float16 1")]
    tables = {
        "compiled": [*summary_table(found), "", "Instructions per weight of a product of one token:", "", *instruction_table(one_token)],
        "roofline": roofline_table(("int4_g128", "q4_k", "q6_k", "q8_0"), (14336, 4096), (1, 16, 64, 512)),
    }
    for name, lines in tables.items():
        head, mark, rest = page.partition(f"<!-- {name}")
        start, end, tail = rest.partition(f"<!-- end of {name} -->")
        if not end:
            raise InputError(f"the page has no `<!-- {name} -->` and `<!-- end of {name} -->`", "put them where the table belongs")
        page = head + mark + start.splitlines()[0] + "\n" + "\n".join(lines) + "\n" + end + tail
    return page


def instruction_table(found: Sequence[Row]) -> list[str]:
    counted = [row for row in found if row.instructions is not None]
    architectures = sorted({row.architecture for row in counted}, key=lambda name: int(name[3:]))
    lines = [f"| format | {' | '.join(architectures)} |", f"|---|{'---:|' * len(architectures)}"]
    for name in dict.fromkeys(row.case.split()[1] for row in counted):
        own = {row.architecture: row.instructions for row in counted if row.case.split()[1] == name}
        cells = (f"{own[each]:.1f}" if own.get(each) else "" for each in architectures)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main(words: Sequence[str]) -> int:
    """`[PAGE] [WORDS]`: compiles all, or what has one of the words in its name; into the page, or onto the screen. 1 if one is no good."""
    page = Path(words[0]) if words and words[0].endswith(".md") else None
    found = rows(jobs(only=words[1:] if page else words), _tell)
    if page:
        page.write_text(fill(page.read_text(), found))
    else:
        sys.stdout.write("\n".join(compiled_table(found)) + "\n")
    return 1 if any(row.problem for row in found) else 0


def _tell(row: Row) -> None:
    sys.stderr.write(f"{row.case} on {row.architecture}: {row.problem or 'good'}, {row.seconds:.1f} s\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
