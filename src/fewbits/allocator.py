"""Freed memory given back to the system.

glibc takes matrices of up to 32 MB from a heap that only shrinks at its end: what is freed between two blocks of a model and does not fit
the next one stays. Ten megabytes were left behind by each block of a small model, which makes a long run's memory grow with the model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def give_back() -> None:
    """After a block or a weight: a millisecond or two. Nothing to do where the system's allocator is another one."""
    if trim := _trim():
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return found
