"""GGUF's codebooks of eight magnitudes out of 8, 25 and 43, in super-blocks of 256: w = d * sub / 8 * sign * magnitude. Layout:

    iq2_xxs  66 bytes: d @0, per 32 columns @2: four indices (8 bits), then four times seven signs and above them the scale (4 bits)
    iq2_xs   74 bytes: d @0, per 8 columns 16 bits @2: index (9 bits), seven signs above; sixteen 4-bit scales @66, the even one low
    iq2_s    82 bytes: d @0, low byte of the indices[32] @2, signs[32] @34, two high bits each [8] @66, scales as iq2_xs @74

A scale s is stored for sub = 2s + 1. Seven signs are those of the first seven columns: the number of negative ones among eight is even.
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

_UNIT = 1 / 8


@dataclass(frozen=True, kw_only=True)
class Iq2Xxs(Vectors):
    group: int = 32

    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        import torch

        from fewbits.formats.storage.bitfields import float16_bytes

        vectors = codes.long().unflatten(-1, (8, 4))
        signs = (vectors >> 8 & 127) << torch.tensor([0, 7, 14, 21])
        words = torch.stack([((vectors & 255) << torch.tensor([0, 8, 16, 24])).sum(-1), signs.sum(-1) | stored_sub(grid).long() << 28], -1)
        return [float16_bytes(grid["d"]), little_endian(words.flatten(-2), "int32")]

    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]:
        import torch

        from fewbits.formats.storage.bitfields import bytes_float16

        words = from_little_endian(fields[1], "int32").unflatten(-1, (8, 2))
        index = words[..., :1] >> torch.tensor([0, 8, 16, 24]) & 255
        signs = eight_signs(words[..., 1:] >> torch.tensor([0, 7, 14, 21]) & 127)
        return (index | signs << 8).flatten(-2).int(), {"sub": sub_of(words[..., 1] >> 28), "d": bytes_float16(fields[0])}


@dataclass(frozen=True, kw_only=True)
class Iq2Xs(Vectors):
    group: int = 16

    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        from fewbits.formats.storage.bitfields import float16_bytes

        words = codes & 0xFFFF  # the eighth sign is the highest bit
        return [float16_bytes(grid["d"]), little_endian(words, "int16"), nibbles(stored_sub(grid))]

    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]:
        from fewbits.formats.storage.bitfields import bytes_float16

        d, packed, scales = fields
        words = from_little_endian(packed, "int16")
        return (words & 511 | eight_signs(words >> 9) << 9).int(), {"sub": sub_of(of_nibbles(scales)), "d": bytes_float16(d)}


@dataclass(frozen=True, kw_only=True)
class Iq2S(Vectors):
    group: int = 16

    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        import torch

        from fewbits.formats.storage.bitfields import float16_bytes, join

        index, signs = codes & 1023, codes >> 10
        high = join((index >> 8).unflatten(-1, (8, 4)).transpose(-1, -2), 2).to(torch.uint8)
        return [float16_bytes(grid["d"]), (index & 255).to(torch.uint8), signs.to(torch.uint8), high, nibbles(stored_sub(grid))]

    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]:
        from fewbits.formats.storage.bitfields import bytes_float16, split

        d, low, signs, high, scales = fields
        index = low.int() | split(high, 2).transpose(-1, -2).flatten(-2).int() << 8
        return index | signs.int() << 10, {"sub": sub_of(of_nibbles(scales)), "d": bytes_float16(d)}


FORMATS = [
    Iq2Xxs(name="iq2_xxs", about="256 points of 8, even signs", fields=(2, 64), unit=_UNIT, largest=31),
    Iq2Xs(name="iq2_xs", about="512 points of 8, even signs", fields=(2, 64, 8), unit=_UNIT, largest=31),
    Iq2S(name="iq2_s", about="1024 points of 8, signs", fields=(2, 32, 32, 8, 8), unit=_UNIT, largest=31, signs="free"),
]
