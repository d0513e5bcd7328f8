"""What the last bits of a floating-point sum depend on: the processor, its instructions, the number of threads, the versions.

Codes that are chosen without calibration are the same everywhere: every block of a weight is fitted by itself, and all kernels give the
same bits. What torch sums (statistics, factors of Hessians, rewrites, tuning) is added up in an order that the machine decides, and codes
that are fitted to it may come out otherwise elsewhere. So provenance names the machine where that is so, and only there.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from fewbits.tensor_files import SafetensorError, TensorFile

SAME_ANYWHERE = "Nothing was calibrated: any processor and any number of threads gives the same bytes."
SAME_HERE = (
    "Codes were fitted to floating-point sums, which another instruction set, number of threads or version of torch adds up in another "
    "order, and so does a GPU: the bytes come again where the machine is this one, and may differ in some codes elsewhere."
)
ABOUT = "about"  # the entry in the header of a kept result: its values, and what made it
_LOOKED_AT = 32  # results of a folder: they are seldom of more than one machine


@dataclass(frozen=True)
class Machine:
    processor: str  # torch's BLAS chooses its code by it
    instructions: str  # that torch uses, in its words: AVX512, AVX2, DEFAULT
    threads: int
    kernels: str  # who does fewbits' own work: native-avx512, reference
    torch: str
    fewbits: str


def here() -> Machine:
    import torch

    from fewbits import kernels

    instructions, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return Machine(processor(), instructions, threads, kernels.backend(), torch.__version__, metadata.version("fewbits"))


def caveat(calibrated: bool) -> str:
    """Who gets the same bytes, in a sentence."""
    return SAME_HERE if calibrated else SAME_ANYWHERE


def with_maker(values: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """What a kept result says in its header: its values, and of what it is told apart by, as `Kept` has it, program and machine."""
    return json.dumps({"values": values, "made_by": [about.get("code"), about.get("machine")]})


def changed(results: Path, about: Mapping[str, Any]) -> str | None:
    """Why the results in a folder are of no use to a run: all that were looked at were made otherwise. None: they are, or none is there."""
    found = []
    for file in islice(results.glob("*.safetensors"), _LOOKED_AT):
        with suppress(SafetensorError, OSError, ValueError, LookupError, TypeError, RecursionError):
            code, (instructions, threads, processor) = json.loads(TensorFile(file).metadata()[ABOUT])["made_by"]
            found.append(_Maker(code, processor, instructions, int(threads)))
    instructions, threads, processor = about["machine"]
    now = _Maker(about["code"], processor, instructions, threads)
    return None if not found or now in found else _difference(found[0], now)


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
def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
