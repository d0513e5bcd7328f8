"""Freed memory returned to the system.

glibc takes matrices of up to 32 MB from a heap that only shrinks at its end. What is freed inside it, and fits no later matrix, stays:
ten megabytes for each block of a small model, so that a long run's memory would grow with the model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def return_free_memory() -> None:
    """Called after a block or a weight; takes one or two milliseconds. Does nothing with an allocator other than glibc's."""
    if trim := _trim():
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return trim
