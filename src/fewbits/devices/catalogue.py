"""The catalogue of devices, with the figures that their vendors publish: devices.csv has one row per device and names the source.

    memory_gib, usable_gib   memory built in, and how much of it a model may take; `Device.reserved` says what takes the rest
    bandwidth                peak memory bandwidth in GB/s
    half, int8, float8       dense matrix products in TFLOP/s or TOP/s; with float32 sums on cards where those are slower. Empty: unknown
    architecture, processors set for the GPUs that kernels/triton compiles for
    fast                     formats that the device multiplies without decoding them first

A card's nominal GB are GiB. Usable memory depends on the kind:

    gpu      1 GiB less: the display, the desktop and the driver's context
    server   1 GiB less for the driver's context, and a 16th less for the error correction of GDDR memory (HBM corrects errors in memory
             of its own); server processors: 4 GiB less
    apple    the share that macOS lets the GPU wire by default: 2/3 below 36 GB, 3/4 from there on
    pc       3 GiB less: the operating system, a desktop, a browser. 0.75 GiB less on a Raspberry Pi without a desktop; 4 GiB less on a
             Steam Deck, of which the GPU takes 1
    phone    half: the system ends an app that takes more
"""

from __future__ import annotations

import csv
import difflib
import re
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from fewbits.devices.units import parse_memory
from fewbits.errors import InputError

BYTES = "memory"  # the kind of a device of which only the memory size is known
_GIB = 1 << 30
_MAKERS = {"nvidia", "geforce", "amd", "radeon", "instinct", "intel", "apple", "tesla", "qualcomm", "gb", "gib", "ram"}
_MACS = {"mac", "macs", "macbook", "imac", "mini", "studio", "air"}
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
    parts: tuple[Device, ...] = ()  # of several that share a model
    behind: Device | None = None  # system memory, for layers that do not fit

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"reserved": self.reserved}

    @property
    def everywhere(self) -> tuple[Device, ...]:
        """All devices that hold a part of the model."""
        return (self.parts or (self,)) + ((self.behind,) if self.behind else ())

    @property
    def reserved(self) -> str:
        """What takes the rest of the memory."""
        return RESERVED.get(self.kind, "")

    @property
    def is_gpu(self) -> bool:
        """Whether a buffer takes its whole size at once, where a processor's takes the pages that are touched, and kernels are launched."""
        return self.kind in ("gpu", "apple") or bool(self.half and self.kind == "server")

    @property
    def reserves(self) -> bool:
        """Whether buffers count with their whole size (`footprint.Use.reserved`). They do if only a size is known, to be safe."""
        return self.is_gpu or self.kind == BYTES


@cache
def all() -> tuple[Device, ...]:
    with Path(__file__).with_name("devices.csv").open(newline="", encoding="utf-8") as file:
        return tuple(_device(row) for row in csv.DictReader(file))


def find(text: str) -> Device:
    """By name, however it is spelled: `rtx4090`, `RTX 4090`, `NVIDIA GeForce RTX 4090` and `4090` find the same device."""
    matches = named(text)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise InputError(f"`{text}` is one of {len(matches)} devices", f"say which: {_listed(matches)}")
    raise InputError(f"no device is named `{text}`", _nearest(text))


def named(text: str) -> list[Device]:
    """All devices that the text may mean: those with its words and the fewest others, sizes of memory not counted."""
    asked = _words(text)
    if asked & _MACS:
        return _macs(asked - _MACS)
    if same := [device for device in all() if _words(device.name) == asked]:
        return same
    matches = [device for device in all() if asked and asked <= _words(device.name)]
    more = {device.name: len(_words(re.sub(r" [0-9]+GB\b", "", device.name)) - asked) for device in matches}
    return [device for device in matches if more[device.name] == min(more.values())]


def _macs(asked: frozenset[str]) -> list[Device]:
    """`mac 32gb`: a Mac of which only the memory is known counts with the slowest memory that is sold in that size."""
    matches = [device for device in all() if device.kind == "apple" and asked and asked <= _words(device.name)]
    sizes = {device.memory for device in matches}
    if len(matches) < 2 or len(sizes) > 1:
        return matches
    slowest = min(matches, key=lambda device: device.bandwidth or 0)
    return [
        replace(slowest, name=f"Mac {slowest.memory >> 30}GB", source=f"{slowest.source}: the bandwidth of {slowest.name}, the slowest")
    ]


def memory(text: str, option: str) -> Device:
    """A device of which only the size of its memory is known."""
    nbytes = parse_memory(text, option)
    return Device(text.strip(), BYTES, nbytes, nbytes, None)


def _words(text: str) -> frozenset[str]:
    """Runs of letters and runs of digits, so that spaces and dashes do not matter; vendors and units are dropped."""
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
    bandwidth, half, int8, float8 = (float(row[name]) if row[name] else None for name in ("bandwidth", "half", "int8", "float8"))
    return Device(
        name=row["name"],
        kind=row["kind"],
        memory=round(float(row["memory_gib"]) * _GIB),
        usable=int(float(row["usable_gib"]) * _GIB),
        architecture=row["architecture"],
        processors=int(row["processors"] or 0),
        fast=tuple(row["fast"].split()),
        source=row["source"],
        bandwidth=bandwidth,
        half=half,
        int8=int8,
        float8=float8,
    )
