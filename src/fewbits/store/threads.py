"""How many threads work on one weight, and how many weights are worked on side by side. Both follow from shapes alone, so that the bytes
are the same wherever a weight is worked on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Condition
from typing import TypeVar

_NARROW = 4096  # columns: up to here matrices are too small to divide, and several weights side by side take less time
TOGETHER = 3 << 29  # bytes that weights on several threads may take together; a weight that needs more runs alone
Item = TypeVar("Item")
Result = TypeVar("Result")


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


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """work(item) of every item, in their order: as many at a time as torch has threads here, each on one thread."""
    import torch

    workers = torch.get_num_threads()

    def alone(item: Item) -> Result:
        torch.set_num_threads(1)
        return work(item)

    try:
        with ThreadPoolExecutor(workers) as pool:
            waiting = [pool.submit(alone, item) for item in items[: 2 * workers]]
            for following in range(len(waiting), len(items) + len(waiting)):
                yield waiting.pop(0).result()
                if following < len(items):  # a few at a time: what is done waits in memory
                    waiting.append(pool.submit(alone, items[following]))
    finally:
        torch.set_num_threads(workers)


class Turns:
    """Lets threads run side by side as long as the memory that they hold together is within a limit."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._changed = Condition()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + nbytes <= self._limit)
            self._held += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._held -= nbytes
                self._changed.notify_all()
