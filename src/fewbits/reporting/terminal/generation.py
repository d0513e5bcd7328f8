"""What `fewbits run` shows: the text on stdout as it grows, figures on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.table import Table

from fewbits.reporting.terminal import console, note, size

if TYPE_CHECKING:
    from fewbits.inference.engine import Generated, Stats
    from fewbits.inference.serving.server import Served


def stream(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def chat_begins(plain: bool, context: int | None, typed: bool) -> None:
    if plain:
        note("there is no chat template: what you write is a text that the model continues")
    if typed:
        room = f", {context} tokens of context" if context else ""
        note(f"Ctrl-C stops an answer; /clear begins anew; /exit or Ctrl-D ends{room}")


def serving(served: Served) -> None:
    console.print(
        f"serving {served.name} at {served.url} ({served.engine}, {served.context} tokens of context); Ctrl-C stops it", soft_wrap=True
    )
    if served.open_to_others:
        note("everybody who reaches this address is answered: there is no authentication; set FEWBITS_API_KEY to ask for a key")


def ended(generated: Generated, whole: bool) -> None:
    """`whole`: nothing was streamed."""
    sys.stdout.write(f"{generated.text}\n" if whole else "\n")
    sys.stdout.flush()


def stats(run: Stats) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    later = f"{run.tokens_per_second:.1f} tokens/s" if run.tokens_per_second else "no second token"
    threads = "one thread" if run.threads == 1 else f"{run.threads} threads"
    for name, text in (
        ("engine", run.engine),
        ("prompt", f"{run.prompt_tokens} tokens, {run.prompt_tokens_per_second:.1f} tokens/s"),
        ("text", f"{run.new_tokens} tokens, {later} on {threads}"),
        ("memory", f"weights {size(run.weight_bytes)}, KV cache {size(run.cache_bytes)}, process {size(run.peak_memory_bytes)} at most"),
        ("kernels", "; ".join(run.kernels)),
    ):
        table.add_row(name, text)
    console.print(table)
