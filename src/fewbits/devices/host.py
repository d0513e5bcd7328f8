"""This machine as a device: the memory that is free now, and its speed as measured in about a second."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from fewbits.devices import processor
from fewbits.devices.catalogue import Device
from fewbits.errors import MissingError

NAME = "this machine"
_SLICE = 64 << 20  # bytes: more than most last-level caches hold
_ROUNDS = 5
_OPERATIONS = 2e8  # of one call that measures a peak: it takes a few ms


def this() -> Device:
    """Its rates are the best of a few calls, because other programs can only slow a call down."""
    free = free_memory()
    if free is None:
        raise MissingError("this system does not say how much memory is free", "give `--memory 12GB` or `--device`")
    rates = _rates() if processor.native_missing() is None else {}
    return Device(
        NAME, "here", total_memory() or free, free, rates.get("read"), rates.get("fp32"), rates.get("int8"),
        source="measured here, in a moment",
    )  # fmt: skip


def free_memory() -> int | None:
    """Bytes that a program can still allocate without making the system swap, limited by the control group if there is one."""
    free = next((int(line.split()[1]) << 10 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable")), None)
    limits = [_left(f"/sys/fs/cgroup/{name}", f"/sys/fs/cgroup/{used}") for name, used in _GROUPS]
    known = [value for value in (free if free is not None else _pages("SC_AVPHYS_PAGES"), *limits) if value is not None]
    return min(known, default=total_memory())


def total_memory() -> int | None:
    return _pages("SC_PHYS_PAGES")


def free_disk(path: Path) -> int | None:
    """Where this path would be written."""
    folder = next(folder for folder in path.absolute().parents if folder.is_dir())
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_GROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def _left(limit: str, used: str) -> int | None:
    most, now = _lines(limit), _lines(used)
    if not (most and now and most[0].strip().isdigit() and now[0].strip().isdigit()):
        return None
    return max(0, int(most[0]) - int(now[0]))


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _pages(name: str) -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf(name)
    except (AttributeError, OSError, ValueError):
        return None


def _rates() -> dict[str, float]:
    """GB/s read from memory, TFLOP/s in fp32 and TOP/s in int8, with all processors."""
    import numpy as np

    native, threads = processor.native(), processors()
    buffer, reader = np.ones(_SLICE, np.uint8), native.roofline_readers()[0]
    rates = {"read": _SLICE / _best(lambda: native.roofline_read(reader, buffer, threads)) / 1e9}
    for unit, isa, in_round in reversed(native.roofline_peaks()):  # the best instruction set last
        rounds = max(1, int(_OPERATIONS / threads / in_round))
        seconds = _best(lambda unit=unit, isa=isa, rounds=rounds: native.roofline_peak(unit, isa, rounds, threads))  # type: ignore[misc]
        rates[unit] = in_round * rounds * threads / seconds / 1e12
    return rates


def _best(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
