"""Numbers of a file with as few digits as they need."""

from __future__ import annotations

import struct
from typing import Any


def tidy(value: Any) -> Any:
    """The shortest decimal number with the same float32: 1e-05, not 9.999999747378752e-06."""
    if not isinstance(value, float):
        return value
    return next(short for digits in range(1, 18) if _same_float32(short := float(f"{value:.{digits}g}"), value))


def _same_float32(a: float, b: float) -> bool:
    return struct.pack("f", a) == struct.pack("f", b)
