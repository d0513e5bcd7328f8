"""`fewbits bench busy`: the whole way on a machine that others compute on too, against the same on a quiet one.

Half of two processors should take twice the time. Threads that spin at barriers while others hold their processor take ten times.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fewbits import embedded
from fewbits.errors import InputError
from fewbits.progress import Progress, silent

_COMPUTES = "while True: sum(range(10_000))"  # in Python alone: no memory is used, and no thread pool


@dataclass(frozen=True)
class Busy:
    competitors: int
    quiet: float  # seconds, at the least of the rounds
    busy: float

    @property
    def ratio(self) -> float:
        return self.busy / self.quiet

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"ratio": self.ratio}


def bench_busy(
    model: str | Path | None = None, samples: int = 48, competitors: int | None = None, rounds: int = 2, progress: Progress[Any] = silent
) -> Busy:
    """Runs take turns. `competitors`: processes that compute beside one; None: as many as there are processors."""
    count = competitors or len(os.sched_getaffinity(0))
    quiet, busy = [], []
    for _ in progress(range(rounds), rounds, "quiet, then busy"):
        quiet.append(_run(model or embedded.MODEL, samples))
        with _competing(count):
            busy.append(_run(model or embedded.MODEL, samples))
    return Busy(count, min(quiet), min(busy))


def _run(model: str | Path, samples: int) -> float:
    """Seconds of `fewbits quantize`, as a user starts it."""
    with tempfile.TemporaryDirectory(prefix="fewbits-") as folder:
        words = ["quantize", str(model), "-o", f"{folder}/m.gguf", "--size", "4.5bpw", "--samples", str(samples), "--offline", "--quiet"]
        began = time.perf_counter()
        ended = subprocess.run([sys.executable, "-m", "fewbits.cli", *words], capture_output=True, text=True, check=False)
        if ended.returncode:
            raise InputError(f"`fewbits quantize` ended with code {ended.returncode}", ended.stderr.strip()[-500:] or "it said nothing")
        return time.perf_counter() - began


@contextmanager
def _competing(count: int) -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", _COMPUTES]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
