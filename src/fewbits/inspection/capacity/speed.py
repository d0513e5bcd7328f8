"""Tokens per second from published figures: an estimate, as a range, to see whether a device is fast enough at all.

Every new token reads once the weights it needs and its context: bytes over bandwidth. Runtimes reach between 0.4 and 0.85 of the
published bandwidth (what users of llama.cpp report for a 7B model: M1 Max 0.58 in q4_0 and 0.78 in fp16, M2 0.84, RTX 3090 0.6, RTX 4090
0.7; on CPUs 0.54 to 0.73, planning/speed.py). A GPU also starts some ten kernels for each layer, 5 us each, which is what bounds a small
model on a fast card: the slow end counts them, and a full context; the fast end counts neither. Codebook types (iq1 to iq3) are bound by
the processor on a CPU of few cores: there the slow end is the share that two cores reach, 0.16 to 0.26 (planning/speed.py).

Reading a prompt is bound by multiplying: 2 operations for each weight and token. Runtimes reach 0.25 to 0.75 of the float16 rate; with
quantized weights they may multiply in int8, at up to 0.3 of that rate (RTX 3090 and 4090 in q4_0: 0.24 and 0.26).
"""

from __future__ import annotations

from dataclasses import dataclass

from fewbits.devices.catalogue import Device
from fewbits.planning import footprint
from fewbits.planning.footprint import Shape, Use

HOW = (
    "bytes a token reads over 0.4 to 0.85 of the bandwidth (iq1 to iq3 on a CPU: from 0.16); "
    "operations of a prompt over 0.25 to 0.75 of the float16 rate"
)
_SHARES = (0.4, 0.85)
_HALF_SHARES = (0.25, 0.75)
_INT8_SHARE = 0.3
_LAUNCHES = 50e-6  # seconds for each layer


@dataclass(frozen=True)
class Range:
    low: float
    high: float


def decode(shape: Shape, read_bytes: float, use: Use, device: Device, kernels: float = 1.0) -> Range | None:
    """New tokens per second, of all sequences together. read_bytes: of weights, for one token. kernels: the share of the bandwidth that
    kernels reach on a CPU of few cores."""
    if not device.bandwidth:
        return None
    rate = device.bandwidth * 1e9
    waits = _LAUNCHES * len(shape.windows) if device.is_gpu else 0.0
    share = _SHARES[0] if device.is_gpu else min(_SHARES[0], kernels)
    slow = read_bytes / (rate * share) + footprint.kv_bytes(shape, use) / (rate * _SHARES[0]) + waits
    return Range(use.sequences / slow, use.sequences / (read_bytes / (rate * _SHARES[1])))


def prefill(multiplied: float, quantized: bool, device: Device) -> Range | None:
    """Tokens of a prompt per second. multiplied: weights that a token meets."""
    if not device.half:
        return None
    top = device.half * _HALF_SHARES[1]
    if quantized and device.int8:
        top = max(top, device.int8 * _INT8_SHARE)
    return Range(*(rate * 1e12 / (2 * multiplied) for rate in (device.half * _HALF_SHARES[0], top)))
