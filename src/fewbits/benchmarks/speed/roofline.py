"""What this machine can do at most, measured: bytes read from memory, 8-bit and float multiplications, per second."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fewbits.benchmarks.timing import Contender, Spread, Timed, interleaved, spread, within
from fewbits.devices import processor
from fewbits.errors import MissingError

# Times the last cache. Of a buffer 2.25 times as large a quarter is found there again: on a Zen 5 it was read at 113 to 133 GB/s, one 16
# times as large at 91, one 64 times as large at 87.
_CACHES = 16
_LEAST, _MOST = 64 << 20, 1 << 30  # bytes to read round and round
_SLICE = 32 << 20  # bytes read in one call
_CACHED = 512 << 10  # bytes per thread that stay in its own cache (L2)
_LEAST_READ = 1 << 20
_OPERATIONS = 5e8  # in one call of a peak: a few ms at most, so that other programs do not interrupt each of them
_LEAST_OPERATIONS = 1e7


@dataclass(frozen=True)
class Limit:
    kind: str  # "read" (bytes), "int8" or "fp32" (operations: a multiplication and an addition are two)
    setting: str  # the instruction set, or where it reads from
    per_second: Spread
    quiet_rounds: int  # that other programs did not disturb; if there were none, the true limit is higher


@dataclass(frozen=True)
class Limits:
    threads: int
    all: tuple[Limit, ...]

    def best(self, kind: str) -> Limit | None:
        """The highest of a kind; reading is from memory, not from a cache."""
        of_kind = [limit for limit in self.all if limit.kind == kind and limit.setting != "cache"]
        return max(of_kind, key=lambda limit: limit.per_second.median, default=None)


@dataclass(frozen=True)
class Machine:
    processor: str
    cores: int
    last_cache: int | None  # bytes
    cold: int  # bytes that weights take in all, so that each call reads them from memory


class Memory:
    """Reads a buffer far larger than the caches, a slice at a time: as a matrix-vector product reads its weights at best."""

    def __init__(self, threads: int, nbytes: int) -> None:
        self._native, self._threads = _native(), threads
        self._isa = self._native.roofline_readers()[0]
        # torch's memory, as the weights' is: numpy asks for large pages, which the weights do not have
        self._buffer = torch.ones(nbytes, dtype=torch.uint8).numpy()

    def reader(self, nbytes: int) -> Yardstick:
        """Of as many bytes in a call, as far as the buffer reaches."""
        nbytes = min(max(nbytes, _LEAST_READ), len(self._buffer))
        places = len(self._buffer) // nbytes

        def call(number: int) -> object:
            start = number % places * nbytes
            return self._native.roofline_read(self._isa, self._buffer[start : start + nbytes], self._threads)

        return Yardstick("read", "memory", nbytes, call)

    def cached(self) -> Yardstick:
        start = self._buffer[: _CACHED * self._threads]
        return Yardstick("read", "cache", len(start), lambda _: self._native.roofline_read(self._isa, start, self._threads))


@dataclass(frozen=True)
class Yardstick:
    """A limit as a contender: what a call of it amounts to, in bytes or operations."""

    kind: str
    setting: str
    amount: float
    call: Callable[[int], object]

    def rates(self, timed: Timed) -> list[float]:
        """Bytes or operations per second, for every round."""
        return [self.amount / seconds for seconds in timed.rounds]

    def limit(self, timed: Timed) -> Limit:
        return Limit(self.kind, self.setting, spread(within(self.rates(timed), timed.quiet)), sum(timed.quiet))


def peaks(threads: int, operations: float) -> list[Yardstick]:
    """Those of this processor, of the best instruction set first in each unit; none that FEWBITS_KERNEL keeps our kernels from."""
    native, yardsticks, beyond = _native(), [], _kept_from()
    for unit, isa, in_round in native.roofline_peaks():
        if isa.replace("-", "").startswith(beyond):
            continue
        rounds = max(1, int(operations / threads / in_round))

        def call(_: int, unit: str = unit, isa: str = isa, rounds: int = rounds) -> object:
            return native.roofline_peak(unit, isa, rounds, threads)

        yardsticks.append(Yardstick(unit, isa, in_round * rounds * threads, call))
    return yardsticks


def _kept_from() -> tuple[str, ...]:
    """Instruction sets above the one that FEWBITS_KERNEL forces: a share of what they could do says nothing about its kernels."""
    names = [name.removeprefix("native-") for name in processor.BACKENDS if name.startswith("native-")]
    chosen = processor.backend().removeprefix("native-")
    return tuple(names[: names.index(chosen)]) if chosen in names else ()


def measure(threads: int, memory: Memory, rounds: int = 9) -> Limits:
    yardsticks = [memory.reader(_SLICE), memory.cached(), *peaks(threads, _OPERATIONS)]
    timed = interleaved([Contender(each.setting, each.call, threads) for each in yardsticks], rounds, threads)
    return Limits(threads, tuple(y.limit(t) for y, t in zip(yardsticks, timed, strict=True)))


class Yardsticks:
    """The limits as contenders among others, so that a share of a limit compares what was timed in the same moments."""

    def __init__(self, threads: int, memory: Memory) -> None:
        self._threads, self._memory = threads, memory
        self._seen: dict[tuple[str, str], tuple[list[float], list[bool]]] = {}

    def of(self, units: set[str], nbytes: int, operations: float) -> list[Yardstick]:
        """Reading, and the best instruction set for each of these units, for products of so many bytes and operations."""
        best = {peak.kind: peak for peak in reversed(peaks(self._threads, min(max(operations, _LEAST_OPERATIONS), _OPERATIONS)))}
        return [self._memory.reader(nbytes), *(peak for unit, peak in best.items() if unit in units)]

    def rates(self, yardsticks: Sequence[Yardstick], timed: Sequence[Timed]) -> dict[str, list[float]]:
        """Bytes or operations per second for every round, by kind."""
        per_second = {}
        for yardstick, each in zip(yardsticks, timed, strict=True):
            per_second[yardstick.kind] = yardstick.rates(each)
            rates, quiet = self._seen.setdefault((yardstick.kind, yardstick.setting), ([], []))
            rates += per_second[yardstick.kind]
            quiet += each.quiet
        return per_second

    def refined(self, limits: Limits) -> Limits:
        """The same limits over all rounds of the run, where they were timed in it: a machine may be slower or faster than when it began."""

        def over_all(limit: Limit) -> Limit:
            rates, quiet = self._seen.get((limit.kind, limit.setting), ([], []))
            return replace(limit, per_second=spread(within(rates, quiet)), quiet_rounds=sum(quiet)) if rates else limit

        return replace(limits, all=tuple(over_all(limit) for limit in limits.all))


def machine(cold: int) -> Machine:
    return Machine(_processor(), _cores(), _last_cache(), cold)


def cold_bytes() -> int:
    """Enough to read memory and no cache when read again and again; at most a sixteenth of what is free, as every contender has one."""
    wanted = _CACHES * (_last_cache() or 256 << 20)
    free = _free_memory()
    return int(min(max(wanted, _LEAST), _MOST, free / 16 if free else _MOST))


def _native() -> Any:
    if reason := processor.native_missing():
        raise MissingError(f"the limits of this machine cannot be measured: {reason}", "build the module, then run this again")
    return processor.native()


def _last_cache() -> int | None:
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K"):
            sizes.append(int(text[:-1]) << 10)
    return max(sizes, default=None)


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")), None)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
