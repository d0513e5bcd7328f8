"""How many threads work on one weight. It follows from its shape alone, so that the bytes are the same wherever the weight is worked on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_NARROW = 4096  # columns: up to here rounding is thousands of small calls, which are slower on two threads than on one


def are_all_used(shape: tuple[int, int]) -> bool:
    return shape[1] > _NARROW


@contextmanager
def for_weight(shape: tuple[int, int]) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    try:
        if not are_all_used(shape):
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)
