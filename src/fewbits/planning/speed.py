"""How fast a plan would generate: every weight is read once for every token, as fast as memory and kernel allow.

The shares are of the memory's read bandwidth, measured for one token on a CPU with llama.cpp's kernels (4096 x 4096, two threads, weights
larger than the cache). They are figures of one kind of machine: a forecast to compare plans by, not a promise.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fewbits import formats
from fewbits.errors import InputError

if TYPE_CHECKING:
    from fewbits.formats import Format
    from fewbits.model.weights import Weight

_SHARES = {
    "fp32": 1.0, "q8_0": 0.71, "q4_0": 0.71, "q4_k": 0.73, "q5_k": 0.66, "q6_k": 0.71, "q3_k": 0.54, "q2_k": 0.57, "iq4_nl": 0.72,
    "iq4_xs": 0.65,
    # looking points up in a codebook is bound by the processor, not by the memory
    "iq1_s": 0.16, "iq1_m": 0.17, "iq2_xxs": 0.20, "iq2_xs": 0.22, "iq2_s": 0.26, "iq3_xxs": 0.22, "iq3_s": 0.20, "q1_0": 0.21,
    "q2_0": 0.03,  # scalar code, on x86
}  # fmt: skip
_USUAL = 0.65  # for formats that were not measured
BANDWIDTH = 30e9  # bytes per second: about two channels of DDR4


def seconds(weight: Weight, fmt: Format, nbytes: int, bandwidth: float) -> float:
    """To read this weight for one token. An embedding that is only looked up takes none."""
    if weight.kind == "embedding" and not weight.tied_to:
        return 0.0
    return nbytes / (bandwidth * share(fmt))


def share(fmt: Format) -> float:
    """Of the memory's bandwidth, that llama.cpp's kernels for one token reach on a CPU."""
    return 1.0 if fmt.is_cast else _SHARES.get(_twin(fmt), _USUAL)


def _twin(fmt: Format) -> str:
    """The measured format of the same values: int4_g32 is q4_0."""
    if fmt.name in _SHARES or fmt.levels is None:  # vectors are not told apart by levels
        return fmt.name
    return next((name for name in _SHARES if formats.get(name).levels == fmt.levels and formats.get(name).group == fmt.group), fmt.name)


def parse_bandwidth(text: str) -> float:
    """`30GB/s`, or a number of GB/s."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) *(GB/s|GB|TB/s)?", text.strip(), re.IGNORECASE)
    if not match or float(match[1]) == 0:
        raise InputError(f"`--bandwidth {text}` is no bandwidth", "for example 30GB/s, what the memory reads")
    return float(match[1]) * (1e12 if (match[2] or "").lower() == "tb/s" else 1e9)
