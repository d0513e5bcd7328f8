"""GGUF's codebooks of four magnitudes out of eight, in super-blocks of 256: w = d * sub * unit * sign * magnitude. Layout:

    iq3_xxs  98 bytes: d @0, indices[64] @2, per 32 columns 32 bits @66: four times seven signs, above them the scale (4 bits)
    iq3_s   110 bytes: d @0, low byte of the indices[64] @2, ninth bits[8] @66, signs[32] @74, eight 4-bit scales @106, the even one low

iq3_xxs has magnitudes from 4 to 62, unit 1/4, and signs that are even over two points: eight columns are one code. iq3_s has 1, 3 .. 15.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats.blocks.vectors import (
    Vectors,
    eight_signs,
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


@dataclass(frozen=True, kw_only=True)
class Iq3Xxs(Vectors):
    group: int = 32

    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        import torch

        from fewbits.formats.storage.bitfields import float16_bytes

        index = torch.stack([codes & 255, codes >> 8 & 255], -1).flatten(-2).to(torch.uint8)
        signs = (codes.long() >> 16 & 127).unflatten(-1, (8, 4)) << torch.tensor([0, 7, 14, 21])
        return [float16_bytes(grid["d"]), index, little_endian(signs.sum(-1) | stored_sub(grid).long() << 28, "int32")]

    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]:
        import torch

        from fewbits.formats.storage.bitfields import bytes_float16

        d, index, packed = fields
        words, points = from_little_endian(packed, "int32"), index.long().unflatten(-1, (-1, 2))
        signs = eight_signs(words.unsqueeze(-1) >> torch.tensor([0, 7, 14, 21]) & 127).flatten(-2)
        codes = points[..., 0] | points[..., 1] << 8 | signs << 16
        return codes.int(), {"sub": sub_of(words >> 28), "d": bytes_float16(d)}


@dataclass(frozen=True, kw_only=True)
class Iq3S(Vectors):
    group: int = 32
    dimension: int = 4

    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        import torch

        from fewbits.formats.storage.bitfields import float16_bytes, join

        index = codes & 511
        ninth = join((index >> 8).unflatten(-1, (8, 8)).transpose(-1, -2), 1).to(torch.uint8)
        low, signs = (index & 255).to(torch.uint8), nibbles(codes >> 9)
        return [float16_bytes(grid["d"]), low, ninth, signs, nibbles(stored_sub(grid))]

    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]:
        from fewbits.formats.storage.bitfields import bytes_float16, split

        d, low, ninth, signs, scales = fields
        index = low.int() | split(ninth, 1).transpose(-1, -2).flatten(-2).int() << 8
        return index | of_nibbles(signs).int() << 9, {"sub": sub_of(of_nibbles(scales)), "d": bytes_float16(d)}


FORMATS = [
    Iq3Xxs(name="iq3_xxs", about="256 points of 4, even signs", fields=(2, 64, 32), unit=1 / 4, largest=31),
    Iq3S(name="iq3_s", about="512 points of 4, signs", fields=(2, 64, 8, 32, 4), unit=1.0, largest=31, signs="free"),
]
