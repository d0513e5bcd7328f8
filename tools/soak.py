"""Quantize and verify the embedded model again and again, in one process and in several at once: nothing may grow, nothing may be left.

    python tools/soak.py [--rounds 200] [--processes 2]

After every round a process looks at its own memory (RssAnon: what the system cannot take back), at its open files and at its threads.
Each has its own folder for temporary files, which must be empty in the end.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WARM_UP = 5  # rounds: what is imported and cached on the way
GROWTH = 64 << 10  # bytes per round, at most: a quarter of one 256 x 256 matrix of the model in float32, 13 MB in 200 rounds
# little text: a round takes seconds
SETTINGS: Mapping[str, Any] = {"size": "4.5bpw", "formats": ("q3_k", "q8_0"), "samples": 2, "length": 64, "tokens": 128}


@dataclass(frozen=True)
class Sample:
    memory: int  # bytes
    files: frozenset[str]  # what its handles are open on
    threads: int


@dataclass(frozen=True)
class Soaked:
    name: str
    rounds: int
    seconds: float
    first: int  # bytes of memory after the warm-up
    last: int
    growth: float  # bytes per round
    faults: tuple[str, ...]

    def __str__(self) -> str:
        memory = f"{self.first / 1e6:.1f} -> {self.last / 1e6:.1f} MB ({self.growth / 1e3:+.1f} kB per round)"
        faults = ", ".join(self.faults) or "nothing grew or was left"
        return f"{self.name}: {self.rounds} rounds in {self.seconds:.0f} s, memory {memory}: {faults}"


def soak(
    folder: Path,
    rounds: int,
    name: str = "alone",
    settings: Mapping[str, Any] = SETTINGS,
    warm_up: int = WARM_UP,
    growth: float = GROWTH,
) -> Soaked:
    """In this process. The folder must not be there yet, and is gone afterwards."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    before, tempfile.tempdir = tempfile.tempdir, str(temporary)
    began, samples, caches = time.monotonic(), list[Sample](), set[Path]()
    try:
        for _ in range(warm_up + rounds):
            one_round(folder / "out", settings)
            samples.append(look())
            if len(samples) == warm_up:
                caches = set(temporary.iterdir())  # of other people's, made once: torch has one
        left = leftovers(folder, caches)
    finally:
        tempfile.tempdir = before
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    return judged(name, samples[warm_up:], left, time.monotonic() - began, growth)


def one_round(out: Path, settings: Mapping[str, Any]) -> None:
    from fewbits import embedded, pipeline
    from fewbits.verification import files

    options = {"no_verify": True, "fresh": True, "executor": "local", **settings}  # what is watched is this process
    made = pipeline.quantize(embedded.MODEL, out / "m.gguf", **options)
    verdict = files.verify(made.path, embedded.MODEL, tokens=settings["tokens"])
    assert verdict.tokens and not verdict.failures, verdict.failures


def look() -> Sample:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free but still held would hide what is lost
    memory = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    handles = Path("/proc/self/fd")
    names = []
    for handle in sorted(os.listdir(handles), key=int):  # noqa: PTH208 - a handle may be gone by the time it is asked for
        try:
            names.append(f"{handle} {(handles / handle).readlink()}")
        except OSError:
            continue
    return Sample(int(memory.split()[1]) << 10, frozenset(names), threading.active_count())


def leftovers(folder: Path, caches: set[Path]) -> list[str]:
    """What a run should not leave: any temporary file, and in the folder of the output hidden files, locks and all but its two results."""
    out = folder / "out"
    paths = [
        *(path for path in (folder / "tmp").iterdir() if path not in caches),
        *(path for path in out.rglob("*") if path.name.startswith(".") or path.name == "lock"),
    ]
    paths += [path for path in out.iterdir() if path.name not in ("m.gguf", "m.gguf.work")]
    return [str(path.relative_to(folder)) for path in paths]


def judged(name: str, samples: list[Sample], left: list[str], seconds: float, limit: float) -> Soaked:
    growth = slope([sample.memory for sample in samples])
    first, last = samples[0], samples[-1]
    faults = [f"memory grows by {growth / 1e3:.1f} kB per round"] if growth > limit else []
    if len(last.files) > len(first.files):
        faults.append(f"open files grow: {', '.join(sorted(last.files - first.files))}")
    if last.threads > first.threads:
        faults.append(f"threads grow from {first.threads} to {last.threads}")
    faults += [f"`{path}` is left" for path in left]
    return Soaked(name, len(samples), seconds, first.memory, last.memory, growth, tuple(faults))


def slope(values: list[int]) -> float:
    """Per step: the median over all pairs, which a jump here and there does not move."""
    pairs = itertools.combinations(enumerate(values), 2)
    return statistics.median((later - earlier) / (j - i) for (i, earlier), (j, later) in pairs)


def together(folder: Path, rounds: int, processes: int, **options: Any) -> list[Soaked]:
    """As many at once, each in a process and a folder of its own."""
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork")) as pool:
        names = [f"process {number + 1} of {processes}" for number in range(processes)]
        running = [pool.submit(soak, folder / str(number), rounds, name, **options) for number, name in enumerate(names)]
        return [each.result() for each in running]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--rounds", type=int, default=200)
    words.add_argument("--processes", type=int, default=2)
    asked = words.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        folder = Path(place)
        results = together(folder / "together", asked.rounds // asked.processes, asked.processes)  # first: forks want no threads
        results.append(soak(folder / "alone", asked.rounds))
    for each in results:
        print(each)
    sys.exit(any(each.faults for each in results))


if __name__ == "__main__":
    main()
