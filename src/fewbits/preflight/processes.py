"""How many processes of this machine measure and quantize, where nobody said it: as many as pay, and as there is memory for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fewbits.devices import host
from fewbits.preflight import steps

if TYPE_CHECKING:
    from fewbits.preflight.sizes import Sizes
    from fewbits.preflight.work import Work

MOST = 8
_STARTED = 4.0  # seconds until a process has loaded torch and the model: it must save a few times as much
_WORTH = 3
_SHARE = 0.5  # of the memory that is free, for all of them


def wanted(sizes: Sizes, work: Work, rate: float) -> int:
    """1: this process does everything. `rate`: operations a second in a large product."""
    import torch

    most = min(torch.get_num_threads(), host.processors(), MOST)  # OMP_NUM_THREADS=1 asks for a single processor
    if not work.feedback or most < 2:
        return 1
    shared, rate, free = steps.narrow(sizes), rate * steps.EFFICIENCY, host.free_memory()
    seconds = steps.measured_seconds([(weight, work.formats_of(weight.shape[1])) for weight in shared], rate)
    seconds += work.makes * steps.feedback_seconds(shared, rate)
    while most > 1 and (
        seconds * (1 - 1 / most) < _WORTH * _STARTED or (free is not None and steps.of_processes(sizes, most) > _SHARE * free)
    ):
        most -= 1
    return most
