"""What this processor can run: the native module `fewbits._native`, and the instruction sets that its kernels are written for.

FEWBITS_KERNEL=reference, scalar, neon, avx2, avxvnni or avx512 forces one of them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from fewbits.errors import InputError

BACKENDS = ("triton", "native-avx512", "native-avxvnni", "native-avx2", "native-neon", "native-scalar", "reference")  # fastest first
ABI = 8  # kernels/native/kernels.h holds the same number
FORCE = "FEWBITS_KERNEL"


class Entry(NamedTuple):
    """One kernel of the native table. `parts` and `grid` name the format's arrays in the order in which the kernel takes them."""

    format: str
    isa: str
    runs_here: bool
    parts: list[str]
    grid: list[str]
    multiplies: bool  # packed weights by activations in int8
    packs: bool


@cache
def native() -> Any:
    """The native module; ask `native_missing` first."""
    return importlib.import_module("fewbits._native")


@cache
def native_missing() -> str | None:
    """Why there are no native kernels; None if there are."""
    try:
        abi = getattr(native(), "ABI", None)
    except ImportError as error:
        return f"the native module cannot be loaded ({error}); `pip install .` builds it"
    if abi != ABI:
        return f"the native module was built for interface {abi}, this fewbits needs {ABI}; `pip install .` builds it anew"
    return None


@cache
def table() -> dict[tuple[str, str], Entry]:
    """Every native kernel by format and instruction set."""
    rows = [] if native_missing() else [Entry(*row) for row in native().kernels()]
    return {(row.format, row.isa): row for row in rows}


def backend() -> str:
    """The backend for work on the processor that is not about one format: the fastest that runs here, or the one that FEWBITS_KERNEL
    forces."""
    if (wanted := forced()) is not None and wanted != "triton":
        return wanted
    return fastest_here()


@cache
def fastest_here() -> str:
    """Whatever is forced."""
    return next((name for name in BACKENDS if any(f"native-{row.isa}" == name and row.runs_here for row in table().values())), "reference")


def fastest(written: Sequence[str]) -> str | None:
    """Which of these instruction sets to use for work that is not about one format: the fastest that runs here, and no faster than the
    one that FEWBITS_KERNEL forces; None: use torch."""
    names = [name.removeprefix("native-") for name in BACKENDS if name != "reference"]
    if (chosen := backend().removeprefix("native-")) == "reference":
        return None
    return next((name for name in names[names.index(chosen) :] if name in written), None)


def forced() -> str | None:
    """The backend that FEWBITS_KERNEL names, or an error if this processor cannot run it. `triton` is not checked here: see `kernels`."""
    if not (wanted := os.environ.get(FORCE)):
        return None
    by_name = {name.removeprefix("native-"): name for name in BACKENDS}
    if wanted not in by_name:
        raise InputError(f"no kernel is named `{wanted}` ({FORCE})", f"set {FORCE} to one of: {', '.join(sorted(by_name))}; or unset it")
    if wanted in ("reference", "triton"):
        return wanted
    if reason := native_missing():
        raise InputError(f"{FORCE} is `{wanted}`, but {reason}", f"unset {FORCE}, or build the module")
    if not any(entry.runs_here for entry in table().values() if entry.isa == wanted):
        raise InputError(f"{FORCE} is `{wanted}`, but this processor has no {wanted}", f"unset {FORCE}, or set it to `scalar`")
    return by_name[wanted]
