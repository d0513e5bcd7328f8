"""The GPUs of the catalogue that the kernels are compiled for, as the roofline model takes them. devices/devices.csv has the figures and
their sources: dense rates, with float32 sums on cards where those are slower.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fewbits.devices import catalogue
from fewbits.devices.catalogue import Device


@dataclass(frozen=True)
class GPU:
    name: str
    architecture: str
    processors: int
    bandwidth: float  # GB/s
    half: float  # TFLOP/s of float16 tensor cores
    int8: float  # TOP/s
    float8: float | None  # TFLOP/s; None: float8 is decoded to float16


def _gpu(device: Device) -> GPU:
    assert device.bandwidth and device.half and device.int8, "a row with an architecture has all rates"
    return GPU(device.name, device.architecture, device.processors, device.bandwidth, device.half, device.int8, device.float8)


ALL = tuple(_gpu(device) for device in catalogue.all() if device.architecture)


def processors(architecture: str) -> int:
    """Processors of the first GPU with this architecture: what a call is made for when it is only compiled."""
    return next(gpu.processors for gpu in ALL if gpu.architecture == architecture)


def named(name: str) -> GPU | None:
    """By the driver's name for it, such as `NVIDIA A100-SXM4-80GB`: the word with a digit in it decides."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    alike = [gpu for gpu in ALL if next(word for word in gpu.name.lower().split() if any(map(str.isdigit, word))) in words]
    return max(alike, key=lambda gpu: len(words & set(gpu.name.lower().split())), default=None)  # the name may include the memory
