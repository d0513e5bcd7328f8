"""Statistics of an activation on a GPU: the call of statistics.py, and what its programs found as one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.calibration import histogram
from fewbits.calibration.histogram import BINS, HALF, Histogram
from fewbits.kernels.triton import statistics, tiles
from fewbits.kernels.triton.calling import Call
from fewbits.kernels.triton.devices import Device, device_of

SEGMENT = 65536  # values of a program


@dataclass(frozen=True)
class Observed:
    count: int
    low: float
    high: float
    mean_square: float
    histogram: Histogram

    @property
    def largest(self) -> float:
        return max(-self.low, self.high, 0.0)


def observe(x: Tensor) -> Observed:
    """Refuses values that are not finite, as the histogram does."""
    if x.numel() == 0:
        raise ValueError("there is nothing to observe")
    values = x.detach().reshape(-1).contiguous()
    into = empty(-(-len(values) // SEGMENT), values.device)
    call(values, into, device_of(values)).run()
    if int(into["broken"].sum()):
        histogram.refuse(values.float().cpu())
    exponents = into["exponents"].long()
    widest = int(exponents.max())
    # twice the width makes bin m // 2 of bin m, below zero too: shifts of integers round down
    shift = (widest - exponents).clamp(max=12).unsqueeze(1)
    places = (torch.arange(-HALF, HALF, device=values.device).unsqueeze(0) >> shift) + HALF
    counts = torch.zeros(BINS, dtype=torch.int64, device=values.device).index_add_(0, places.flatten(), into["counts"].flatten().long())
    squares = float((into["squares"].double() * torch.exp2(2.0 * exponents.double())).sum())
    return Observed(
        len(values), float(into["lows"].min()), float(into["highs"].max()), squares / len(values), Histogram.of_counts(counts.cpu(), widest)
    )


def call(values: Tensor, into: dict[str, Tensor], device: Device) -> Call:
    tile = tiles.choose("observe", device.architecture, 8)
    constants = {"SEGMENT": SEGMENT, "BLOCK": tile.width, "BINS": BINS}
    return Call(statistics.observe, (-(-len(values) // SEGMENT),), {"x": values, **into, "n": len(values)}, constants, tile.warps)


def empty(programs: int, device: torch.device | str) -> dict[str, Tensor]:
    """What the programs write into."""

    def new(dtype: torch.dtype, *more: int) -> Tensor:
        return torch.empty((programs, *more), dtype=dtype, device=device)

    floats = {name: new(torch.float32) for name in ("lows", "highs", "squares")}
    return {"counts": new(torch.int32, BINS), "exponents": new(torch.int32), **floats, "broken": new(torch.int32)}
