"""A model that does not fit into the GPUs and has system memory behind them: how many layers stay, and how fast a token passes through.

As llama.cpp divides it (`-ngl`): whole layers with their KV cache go to the GPUs as long as there is room; the others, the embedding and
the output stay in system memory, and the processor computes them there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fewbits.devices.catalogue import Device
from fewbits.inspection.capacity import speed
from fewbits.inspection.capacity.speed import Range
from fewbits.planning import footprint
from fewbits.planning.footprint import Shape, Use


@dataclass(frozen=True)
class Held:
    """The bytes of a model, in its layers and beside them (embedding, output)."""

    layers: int
    beside: int
    read_layers: float  # of them, for one token
    read_beside: float


@dataclass(frozen=True)
class Offload:
    layers: int  # on the GPUs
    of: int
    gpu_bytes: int
    ram_bytes: int
    decode: Range | None


def offload(shape: Shape, held: Held, use: Use, device: Device, kernels: float) -> Offload | None:
    """None: it does not fit into both together either, or no layer fits into the GPUs. `kernels`: the share of the bandwidth that a
    processor of few cores reaches."""
    ram = device.behind
    assert ram is not None, "asked only where there is one"
    count, parts = len(shape.windows), device.parts or (device,)
    fixed = footprint.memory(shape, 0, replace(use, devices=1))
    one = -(-(held.layers + fixed.kv_cache) // count)
    layers = min(count, sum(max(0, part.usable - fixed.activations) // one for part in parts))
    there = count - layers
    in_ram = held.beside + there * one + fixed.activations + fixed.overhead
    if not layers or in_ram > ram.usable:
        return None
    share = layers / count
    return Offload(
        layers, count, layers * one + len(parts) * fixed.activations, in_ram, _speed(shape, held, use, (device, ram), share, kernels)
    )


def _speed(shape: Shape, held: Held, use: Use, places: tuple[Device, Device], share: float, kernels: float) -> Range | None:
    """The times of both parts, one after the other."""
    gpu, ram = places
    windows = shape.windows
    split = round(len(windows) * share)
    on_gpu = speed.decode(replace(shape, windows=windows[:split]), held.read_layers * share, use, gpu)
    rest = held.read_layers * (1 - share) + held.read_beside
    in_ram = speed.decode(replace(shape, windows=windows[split:]), rest, use, ram, kernels)
    if on_gpu is None or in_ram is None:
        return None
    return Range(*(1 / (1 / one + 1 / other) for one, other in ((on_gpu.low, in_ram.low), (on_gpu.high, in_ram.high))))
