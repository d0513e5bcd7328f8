"""The GPUs of the catalogue that the kernels are compiled for, as the roofline model wants them: dense rates, sums in float32 where a
card is slower with them. The figures and their sources are in capacity/devices.csv.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fewbits.capacity import devices
from fewbits.capacity.devices import Device


@dataclass(frozen=True)
class GPU:
    name: str
    architecture: str
    processors: int
    bandwidth: float  # GB/s
    half: float  # TFLOP/s of float16 tensor cores
    int8: float  # TOP/s
    float8: float | None  # TFLOP/s; None: decoded to float16


def _gpu(device: Device) -> GPU:
    assert device.bandwidth and device.half and device.int8, "a row with an architecture has all rates"
    return GPU(device.name, device.architecture, device.processors, device.bandwidth, device.half, device.int8, device.float8)


ALL = tuple(_gpu(device) for device in devices.all() if device.architecture)


def processors(architecture: str) -> int:
    """Of the first GPU of an architecture: what calls are made for when none is here."""
    return next(gpu.processors for gpu in ALL if gpu.architecture == architecture)


def named(told: str) -> GPU | None:
    """By the name that the driver tells, such as `NVIDIA A100-SXM4-80GB`: the word of the name that has a number in it decides."""
    words = set(re.split(r"[^a-z0-9]+", told.lower()))
    alike = [gpu for gpu in ALL if next(word for word in gpu.name.lower().split() if any(map(str.isdigit, word))) in words]
    return max(alike, key=lambda gpu: len(words & set(gpu.name.lower().split())), default=None)  # the memory may be said too
