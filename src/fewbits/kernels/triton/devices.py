"""Which GPU a tensor lies on, as the kernels see it. Without one (the interpreter) it is taken for an A100."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Device:
    architecture: str  # sm_80 ... or gfx942 ...
    processors: int  # multiprocessors, or compute units


INTERPRETER = Device("sm_80", 108)


def device_of(x: Tensor) -> Device:
    return INTERPRETER if x.device.type != "cuda" else _cuda(x.device.index or 0)


@cache
def _cuda(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return Device(str(found.gcnArchName).split(":")[0], found.multi_processor_count)
    return Device(f"sm_{found.major}{found.minor}", found.multi_processor_count)
