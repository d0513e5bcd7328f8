"""`fewbits bench kernels --backend triton`: compiled for every GPU without one, or timed where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, NoReturn

import typer

from fewbits.cli.output import progress_for, show_json

if TYPE_CHECKING:
    from fewbits.formats import Shape


def compile_only(formats: Sequence[str], architectures: Sequence[str], as_json: bool) -> NoReturn:
    """Exit code 1 if a kernel spills registers, misses its tensor cores or loads too narrowly."""
    from fewbits.benchmarks.gpu import compiled
    from fewbits.kernels.triton import tile_shapes
    from fewbits.kernels.triton.tooling import compiler
    from fewbits.reporting.terminal import console

    wanted = compiled.jobs(architectures or tile_shapes.ARCHITECTURES, formats)
    rows = list(progress_for(as_json, False)(compiler.compile_all(wanted), len(wanted), "compiling"))
    if as_json:
        show_json([asdict(row) for row in rows])
    else:
        console.print("\n".join(compiled.compiled_table(rows)), markup=False, soft_wrap=True)
    raise typer.Exit(1 if any(row.problem for row in rows) else 0)


def timed(formats: Sequence[str], shapes: Sequence[Shape], tokens: Sequence[int], as_json: bool) -> NoReturn:
    """Beside torch, and torchao and gemlite where they are installed. Without a GPU: what the roofline expects of known ones."""
    from fewbits import formats as known
    from fewbits.benchmarks.gpu import compiled, products
    from fewbits.kernels import triton
    from fewbits.reporting.terminal import console, note

    if reason := triton.runs_here():
        note(f"nothing is timed: {reason}; microseconds that the roofline expects:")
        for shape in shapes:
            console.print("\n".join(compiled.roofline_table(formats, shape, tokens)), markup=False, soft_wrap=True)
        raise typer.Exit(3)
    wanted = [(name, shape, count) for shape in shapes for name in formats for count in tokens]
    steps = progress_for(as_json, False)(wanted, len(wanted), "timing")
    cases = [(name, shape, count, products.measure(known.get(name), shape, count)) for name, shape, count in steps]
    if as_json:
        show_json(
            [{"format": f, "rows": s[0], "cols": s[1], "tokens": t, "results": [asdict(r) for r in results]} for f, s, t, results in cases]
        )
    else:
        for name, shape, count, results in cases:
            console.print(f"{name}, {shape[1]} x {shape[0]}, {count} tokens")
            console.print("\n".join(products.table(results)), markup=False, soft_wrap=True)
    raise typer.Exit(0)
