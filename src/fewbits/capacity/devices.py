"""Devices that people have, as their vendors publish them: devices.csv, one row each, with the source of its figures.

    memory_gib, usable_gib   what is built in, and what a model may take of it; `Device.reserved` says why that is less
    bandwidth                GB/s that the memory reads at best
    half, int8, float8       dense TFLOP/s and TOP/s of matrix products, sums in float32 where a card is slower with them; empty: unknown
    architecture, processors of the GPUs that kernels/triton compiles for
    fast                     formats that the device multiplies in as they are; every other format is decoded on the way

A card's nominal GB are GiB. Usable memory follows from the kind:

    gpu      1 GiB less: the display, the desktop and the driver's own context
    server   1 GiB less for the driver's context, and a 16th for the error correction of GDDR memory (HBM has its own); boards: 4 GiB less
    apple    what macOS lets the GPU wire unless told: 2/3 below 36 GB, 3/4 from there on
    pc       3 GiB less: the operating system, a desktop, a browser; a Raspberry Pi without a desktop 0.75, a Steam Deck 4 (1 is the GPU's)
    phone    half: the system ends an app that takes more
"""

from __future__ import annotations

import csv
import difflib
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from fewbits import hardware
from fewbits.errors import InputError

_BYTES = "memory"  # the kind of a place of which only its size is known
_GIB = 1 << 30
_MAKERS = {"nvidia", "geforce", "amd", "radeon", "instinct", "intel", "apple", "tesla", "qualcomm", "gb", "gib", "ram"}
_SHOWN = 6
RESERVED = {
    "gpu": "display, desktop and driver",
    "server": "driver context and error correction",
    "apple": "what macOS keeps from the GPU",
    "pc": "operating system and desktop",
    "phone": "what a phone leaves one app",
}


@dataclass(frozen=True)
class Device:
    name: str
    kind: str  # gpu, server, apple, pc or phone
    memory: int  # bytes, built in
    usable: int  # bytes that a model may take
    bandwidth: float | None  # GB/s; None: not known
    half: float | None = None  # TFLOP/s
    int8: float | None = None  # TOP/s
    float8: float | None = None  # TFLOP/s; None: decoded to float16
    architecture: str = ""
    processors: int = 0
    fast: tuple[str, ...] = ()
    source: str = ""

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"reserved": self.reserved}

    @property
    def reserved(self) -> str:
        """Who has the rest of the memory."""
        return RESERVED.get(self.kind, "")

    @property
    def is_gpu(self) -> bool:
        """Its memory is taken as reserved, and its kernels are started one by one."""
        return self.kind in ("gpu", "apple") or bool(self.half and self.kind == "server")

    @property
    def reserves(self) -> bool:
        """Where nothing is known but a size, the larger count holds."""
        return self.is_gpu or self.kind == _BYTES


@cache
def all() -> tuple[Device, ...]:
    with Path(__file__).with_name("devices.csv").open(newline="", encoding="utf-8") as file:
        return tuple(_device(row) for row in csv.DictReader(file))


def find(text: str) -> Device:
    """By its name in any spelling: `rtx4090`, `RTX 4090`, `NVIDIA GeForce RTX 4090` and `4090` are one."""
    asked = _words(text)
    same = [device for device in all() if _words(device.name) == asked]
    found = same or [device for device in all() if asked and asked <= _words(device.name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"`{text}` is one of {len(found)} devices", f"say which: {_listed(found)}")
    raise InputError(f"no device is named `{text}`", _nearest(text))


def place(text: str, option: str = "--fits") -> Device:
    """A device by its name, or nothing but memory: `8GB`."""
    bare = text.strip()
    model_number = len(bare) == 4 and any(bare in _words(device.name) for device in all())  # `4090` is a card, not bytes
    return memory(text, option) if re.match(r"[0-9.]", bare) and not model_number else find(text)


def memory(text: str, option: str) -> Device:
    """So many bytes of which nothing else is known."""
    nbytes = hardware.parse_memory(text, option)
    return Device(text.strip(), _BYTES, nbytes, nbytes, None)


def _words(text: str) -> frozenset[str]:
    """Letters and numbers apart, so that spaces and dashes do not count; makers and units say nothing."""
    return frozenset(re.findall(r"[a-z]+|[0-9]+", text.lower())) - _MAKERS


def _nearest(text: str) -> str:
    names = {device.name.lower(): device for device in all()}
    near = [names[name] for name in difflib.get_close_matches(text.lower(), names, n=_SHOWN, cutoff=0.5)]
    if near:
        return f"did you mean {_listed(near)}? Or give bytes, such as 8GB"
    return f"`fewbits fit --devices` lists all {len(names)}; or give bytes, such as 8GB"


def _listed(devices: list[Device]) -> str:
    shown = ", ".join(f"`{device.name}`" for device in devices[:_SHOWN])
    return shown if len(devices) <= _SHOWN else f"{shown} ..."


def _device(row: dict[str, str]) -> Device:
    rates = {name: float(row[name]) if row[name] else None for name in ("bandwidth", "half", "int8", "float8")}
    return Device(
        name=row["name"],
        kind=row["kind"],
        memory=round(float(row["memory_gib"]) * _GIB),
        usable=int(float(row["usable_gib"]) * _GIB),
        architecture=row["architecture"],
        processors=int(row["processors"] or 0),
        fast=tuple(row["fast"].split()),
        source=row["source"],
        **rates,
    )
