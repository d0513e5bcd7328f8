"""The GPU that holds a tensor, as far as the kernels need to know it. The interpreter, which has none, counts as an A100."""

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
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return Device(str(properties.gcnArchName).split(":")[0], properties.multi_processor_count)
    return Device(f"sm_{properties.major}{properties.minor}", properties.multi_processor_count)
