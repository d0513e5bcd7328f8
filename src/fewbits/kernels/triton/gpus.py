"""GPUs that people have, as their vendors publish them: dense rates, sums in float32 where a card is slower with them. For the roofline
model.

Sources: NVIDIA's data sheets and architecture whitepapers (A100, Ada, Hopper, Blackwell, GeForce RTX), AMD's data sheets and CDNA / RDNA
guides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    name: str
    architecture: str
    processors: int
    bandwidth: float  # GB/s
    half: float  # TFLOP/s of float16 tensor cores
    int8: float  # TOP/s
    float8: float | None  # TFLOP/s; None: decoded to float16


ALL = (
    GPU("A100 80GB SXM", "sm_80", 108, 2039, 312, 624, None),
    GPU("RTX 3090", "sm_86", 82, 936, 71, 284, None),
    GPU("RTX 4090", "sm_89", 128, 1008, 165.2, 660.6, 330.3),
    GPU("L4", "sm_89", 58, 300, 121, 242, 242),
    GPU("L40S", "sm_89", 142, 864, 362, 733, 733),
    GPU("H100 SXM", "sm_90", 132, 3350, 989, 1979, 1979),
    GPU("H200", "sm_90", 132, 4800, 989, 1979, 1979),
    GPU("B200", "sm_100", 148, 8000, 2250, 4500, 4500),
    GPU("RTX 5090", "sm_120", 170, 1792, 209.5, 838, 419),
    GPU("MI210", "gfx90a", 104, 1638, 181, 181, None),
    GPU("MI300X", "gfx942", 304, 5300, 1307, 2615, None),
    GPU("RX 7900 XTX", "gfx1100", 96, 960, 122.8, 122.8, None),
)


def processors(architecture: str) -> int:
    """Of the first GPU of an architecture: what calls are made for when none is here."""
    return next(gpu.processors for gpu in ALL if gpu.architecture == architecture)


def named(told: str) -> GPU | None:
    """By the name that the driver tells, such as `NVIDIA A100-SXM4-80GB`: the word of the name that has a number in it decides."""
    words = set(re.split(r"[^a-z0-9]+", told.lower()))
    return next((gpu for gpu in ALL if next(word for word in gpu.name.lower().split() if any(map(str.isdigit, word))) in words), None)
