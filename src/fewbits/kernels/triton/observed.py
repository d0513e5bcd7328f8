"""Statistics of an activation on a GPU: launches kernels/statistics.py and merges what its programs counted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.errors import InputError
from fewbits.kernels.triton import tile_shapes
from fewbits.kernels.triton.call import Call
from fewbits.kernels.triton.device import Device, device_of
from fewbits.kernels.triton.kernels import statistics

BINS = 4096  # as in calibration.histogram
HALF = BINS // 2
SEGMENT = 65536  # values per program


@dataclass(frozen=True)
class Observed:
    low: float
    high: float
    mean_square: float
    counts: Tensor  # (BINS,) int64 on the processor, over (-2 ** exponent, 2 ** exponent)
    exponent: int


def observe(x: Tensor) -> Observed:
    """Refuses values that are not finite, as calibration.histogram does."""
    if x.numel() == 0:
        raise ValueError("there is nothing to observe")
    values = x.detach().reshape(-1).contiguous()
    into = empty(-(-len(values) // SEGMENT), values.device)
    call(values, into, device_of(values)).run()
    if broken := int(into["broken"].sum()):
        raise InputError(f"{broken} of {len(values)} activations are not finite", "check the model's weights, or run it in float32")
    exponents = into["exponents"].long()
    widest = int(exponents.max())
    # doubling the width turns bin m into bin m // 2, below zero too, because shifts of integers round down
    shift = (widest - exponents).clamp(max=12).unsqueeze(1)
    places = (torch.arange(-HALF, HALF, device=values.device).unsqueeze(0) >> shift) + HALF
    counts = torch.zeros(BINS, dtype=torch.int64, device=values.device).index_add_(0, places.flatten(), into["counts"].flatten().long())
    squares = float((into["squares"].double() * torch.exp2(2.0 * exponents.double())).sum())
    return Observed(float(into["lows"].min()), float(into["highs"].max()), squares / len(values), counts.cpu(), widest)


def call(values: Tensor, into: dict[str, Tensor], device: Device) -> Call:
    tile = tile_shapes.choose("observe", device.architecture, 8)
    constants = {"SEGMENT": SEGMENT, "BLOCK": tile.width, "BINS": BINS}
    return Call(statistics.observe, (-(-len(values) // SEGMENT),), {"x": values, **into, "n": len(values)}, constants, tile.warps)


def empty(programs: int, device: torch.device | str) -> dict[str, Tensor]:
    """The arrays that the programs write into."""

    def new(dtype: torch.dtype, *more: int) -> Tensor:
        return torch.empty((programs, *more), dtype=dtype, device=device)

    floats = {name: new(torch.float32) for name in ("lows", "highs", "squares")}
    return {"counts": new(torch.int32, BINS), "exponents": new(torch.int32), **floats, "broken": new(torch.int32)}
