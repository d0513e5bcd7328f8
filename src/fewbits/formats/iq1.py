"""GGUF's codebook of 2048 vectors of eight out of -1, 0 and 1, in super-blocks of 256: w = d * sub * (point +- 1/8). Layout:

    iq1_s  50 bytes: d @0, low byte of the indices[32] @2, per 32 columns 16 bits @34: four times three high bits, the scale (3 bits),
           the shift (1: down)
    iq1_m  56 bytes: low byte of the indices[32] @0, per 8 columns four bits [16] @32: three high bits and the shift, the even column
           low; four 16-bit numbers @48: four 3-bit scales each (of 16 columns), and above them four bits of d

A scale s is stored for sub = 2s + 1. iq1_s shifts all points under one scale alike, iq1_m each point: there the shift is part of the code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats.blocks.vectors import (
    Vectors,
    from_little_endian,
    little_endian,
    nibbles,
    of_nibbles,
    stored_sub,
    sub_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Grid

_SHIFT = 1 / 8


@dataclass(frozen=True, kw_only=True)
class Iq1S(Vectors):
    group: int = 32

    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        import torch

        from fewbits.formats.storage.bitfields import float16_bytes

        high = ((codes >> 8).unflatten(-1, (8, 4)) << torch.tensor([0, 3, 6, 9], dtype=torch.int32)).sum(-1)
        words = high | stored_sub(grid) << 12 | (grid["shift"] < 0).int() << 15
        return [float16_bytes(grid["d"]), (codes & 255).to(torch.uint8), little_endian(words, "int16")]

    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]:
        import torch

        from fewbits.formats.storage.bitfields import bytes_float16

        d, low, packed = fields
        words = from_little_endian(packed, "int16")
        high = (words.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9]) & 7).flatten(-2)
        shift = (1 - 2 * (words >> 15)).to(torch.int8)
        return (low | high << 8).int(), {"sub": sub_of(words >> 12 & 7), "shift": shift, "d": bytes_float16(d)}


@dataclass(frozen=True, kw_only=True)
class Iq1M(Vectors):
    group: int = 16

    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        import torch

        scales = (stored_sub(grid).unflatten(-1, (4, 4)) << torch.tensor([0, 3, 6, 9], dtype=torch.int32)).sum(-1)
        d = grid["d"].contiguous().view(torch.int16).int() >> torch.tensor([0, 4, 8, 12], dtype=torch.int32) & 15
        return [(codes & 255).to(torch.uint8), nibbles(codes >> 8), little_endian(scales | d << 12, "int16")]

    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]:
        import torch

        low, high, packed = fields
        words = from_little_endian(packed, "int16")
        scales = (words.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9]) & 7).flatten(-2)
        d = ((words >> 12) << torch.tensor([0, 4, 8, 12])).sum(-1, keepdim=True).to(torch.int16).view(torch.float16)
        return low.int() | of_nibbles(high).int() << 8, {"sub": sub_of(scales), "d": d}


FORMATS = [
    Iq1S(name="iq1_s", about="2048 points of 8", fields=(2, 32, 16), unit=1.0, largest=15, signs="in the points", group_shift=_SHIFT),
    Iq1M(
        name="iq1_m",
        about="2048 points of 8, shifted",
        fields=(32, 16, 8),
        unit=1.0,
        largest=15,
        signs="in the points",
        shifts=(_SHIFT, -_SHIFT),
    ),
]
