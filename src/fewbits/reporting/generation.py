"""What `fewbits run` shows: the text on stdout as it grows, figures on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.table import Table

from fewbits.reporting.terminal import console, size

if TYPE_CHECKING:
    from fewbits.benchmarks.generating import TokenBench
    from fewbits.generation import Generated, Stats


def stream(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def ended(found: Generated, whole: bool) -> None:
    """`whole`: nothing was streamed."""
    sys.stdout.write(f"{found.text}\n" if whole else "\n")
    sys.stdout.flush()


def stats(found: Stats) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    later = f"{found.tokens_per_second:.1f} tokens/s" if found.tokens_per_second else "no second token"
    for name, text in (
        ("engine", found.engine),
        ("prompt", f"{found.prompt_tokens} tokens, {found.prompt_tokens_per_second:.1f} tokens/s"),
        ("text", f"{found.new_tokens} tokens, {later} on {_threads(found.threads)}"),
        (
            "memory",
            f"weights {size(found.weight_bytes)}, KV cache {size(found.cache_bytes)}, process {size(found.peak_memory_bytes)} at most",
        ),
        ("kernels", "; ".join(found.kernels)),
    ):
        table.add_row(name, text)
    console.print(table)


def bench(result: TokenBench) -> None:
    console.print(
        f"[bold]{result.model}, {result.format}, {_threads(result.threads)}[/]: {size(result.weight_bytes)} of weights for a token, "
        f"memory is read at {result.read_bytes_per_second / 1e9:.1f} GB/s; text of {result.prompt} tokens"
    )
    table = Table(box=None, header_style="dim")
    for column in ("", "by", "tokens/s", "of the memory's speed", "fewbits is"):
        table.add_column(column, justify="left" if column in ("", "by") else "right")
    for phase in result.phases:
        share = "" if phase.share_of_bandwidth is None else f"{phase.share_of_bandwidth:.0%}"
        times = "" if phase.speedup is None else f"{phase.speedup.median:.2f} times as fast"
        doubt = "" if phase.quiet_rounds else " ?"
        table.add_row(phase.name, phase.contender, f"{phase.tokens_per_second:.1f}{doubt}", share, times)
    console.print(table)


def _threads(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"
