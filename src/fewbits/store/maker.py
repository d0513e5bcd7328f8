"""Which program and machine made a cached result. Another one's results could differ in the last bits: a run ignores them and says why."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from fewbits.store.tensor_file import SafetensorError, TensorFile

ABOUT = "about"  # the entry in the header of a cached result: its values, and what made it
_SAMPLED = 32  # results of a folder that are looked at: they seldom come from more than one machine


def with_maker(values: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """The header entry of a cached result: its values, and the program and machine out of `Cache.about`."""
    return json.dumps({"values": values, "made_by": [about.get("code"), about.get("machine")]})


def changed(results: Path, about: Mapping[str, Any]) -> str | None:
    """Why this run cannot use the cached results in a folder: none of the sampled ones has its maker. None: it can, or there are none."""
    makers = []
    for file in islice(results.glob("*.safetensors"), _SAMPLED):
        with suppress(SafetensorError, OSError, ValueError, LookupError, TypeError, RecursionError):
            code, (instructions, threads, processor) = json.loads(TensorFile(file).metadata()[ABOUT])["made_by"]
            makers.append(_Maker(code, processor, instructions, int(threads)))
    instructions, threads, processor = about["machine"]
    now = _Maker(about["code"], processor, instructions, threads)
    return None if not makers or now in makers else _difference(makers[0], now)


class _Maker(NamedTuple):
    code: str
    processor: str
    instructions: str
    threads: int


def _difference(before: _Maker, now: _Maker) -> str:
    was, are = [], []
    if before.processor != now.processor:
        was, are = [f"on {before.processor}"], [f"on {now.processor}"]
    if before.instructions != now.instructions:
        was, are = [*was, f"with {before.instructions} instructions"], [*are, f"with {now.instructions}"]
    if before.threads != now.threads:
        was, are = [*was, f"with {_threads(before.threads)}"], [*are, f"with {_threads(now.threads)}"]
    if before.code != now.code:
        was = [*was, "by another version of fewbits, torch or transformers"]
    runs = f", this one runs {' and '.join(are)}" if are else ""
    said = f"results of an earlier run were made {' and '.join(was)}{runs}: they are made anew"
    return f"{said} (OMP_NUM_THREADS={before.threads} would go on from them)" if before[:3] == now[:3] else said


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


@cache
def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
