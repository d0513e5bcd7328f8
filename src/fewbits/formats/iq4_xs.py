"""iq4_nl's uneven levels in super-blocks of 256: w = d * scale * level. 136 bytes, 4.25 bits per weight:

d @0, scale_top[2] @2 (two bits each, first scale lowest), scale_low[4] @4 (nibbles, even scale low; stored + 32),
nibbles[128] @8 (per 32: byte j holds element j low, j+16 high)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats.block32 import NON_LINEAR
from fewbits.formats.blocks import SubScales

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Grid


@dataclass(frozen=True, kw_only=True)
class Iq4Xs(SubScales):
    group: int = 32
    block: int = 256

    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        import torch

        from fewbits.formats.storage.bitfields import float16_bytes, halves, join

        scale = (grid["sub"].short() + 32).to(torch.uint8)
        top = join((scale >> 4).unflatten(-1, (2, 4)).transpose(-1, -2), 2)
        low = join((scale & 15).unflatten(-1, (4, 2)).transpose(-1, -2), 4)
        return [float16_bytes(grid["d"]), top, low, halves(codes.unflatten(-1, (8, 32))).flatten(-2)]

    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]:
        import torch

        from fewbits.formats.storage.bitfields import bytes_float16, split, unhalve

        d, top, low, nibbles = fields
        scale = split(low, 4).transpose(-1, -2).flatten(-2) | (split(top, 2).transpose(-1, -2).flatten(-2) << 4)
        codes = unhalve(nibbles.unflatten(-1, (8, 16))).flatten(-2)
        return codes, {"sub": (scale.short() - 32).to(torch.int8), "d": bytes_float16(d)}


FORMATS = [
    Iq4Xs(
        name="iq4_xs",
        about="4 bits, uneven, sub-scales",
        levels=NON_LINEAR,
        fields=(2, 2, 4, 128),
        ends=(-127.0, 113.0),
        integers=range(-32, 32),
    )
]
