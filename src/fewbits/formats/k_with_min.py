"""GGUF's super-blocks of 256 with integer scales and minima: w = d * scale * q - dmin * min. Layout:

    q2_k     84 bytes: (4-bit scale low, 4-bit min high)[16] @0, codes[64] @16 (per 128: byte l holds l, l+32, l+64, l+96),
             d @80, dmin @82
    q4_k    144 bytes: d @0, dmin @2, eight (6-bit scale, 6-bit min)[12] @4, nibbles[128] @16 (per 64: first 32 low)
    q5_k    176 bytes: d @0, dmin @2, scales and minima as q4_k @4, top[32] @16 (bit i of byte l: fifth bit of element
            32i+l), nibbles[128] @48

The twelve bytes: 0-3 hold scales 0-3 and the top two bits of scales 4-7; 4-7 the same of the minima; 8-11 the low four
bits of scales 4-7 (low nibble) and of minima 4-7 (high).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats.blocks import SubScalesAndMins, consecutive

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Grid


@dataclass(frozen=True, kw_only=True)
class Q2K(SubScalesAndMins):
    group: int = 16
    block: int = 256

    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        from fewbits.formats.storage.bitfields import float16_bytes, join

        scales = grid["sub"] | (grid["sub_min"] << 4)
        return [scales, join(codes.unflatten(-1, (2, 4, 32)), 2).flatten(-2), float16_bytes(grid["d"]), float16_bytes(grid["dmin"])]

    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]:
        from fewbits.formats.storage.bitfields import bytes_float16, split

        scales, packed, d, dmin = fields
        codes = split(packed.unflatten(-1, (2, 32)), 2).flatten(-3)
        return codes, {"sub": scales & 15, "sub_min": scales >> 4, "d": bytes_float16(d), "dmin": bytes_float16(dmin)}


@dataclass(frozen=True, kw_only=True)
class Q45K(SubScalesAndMins):
    group: int = 32
    block: int = 256

    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        from fewbits.formats.storage.bitfields import float16_bytes, join

        head = [float16_bytes(grid["d"]), float16_bytes(grid["dmin"]), *_join_scales(grid["sub"], grid["sub_min"])]
        by_run = codes.unflatten(-1, (8, 32))
        nibbles = join((by_run & 15).unflatten(-2, (4, 2)), 4).flatten(-2)
        return [*head, join(by_run >> 4, 1), nibbles] if len(self.fields) == 7 else [*head, nibbles]

    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]:
        from fewbits.formats.storage.bitfields import bytes_float16, split

        d, dmin, first, second, third, *top, nibbles = fields
        codes = split(nibbles.unflatten(-1, (4, 32)), 4).flatten(-3)
        if top:
            codes |= split(top[0], 1).flatten(-2) << 4
        sub, sub_min = _split_scales(first, second, third)
        return codes, {"sub": sub, "sub_min": sub_min, "d": bytes_float16(d), "dmin": bytes_float16(dmin)}


def _join_scales(sub: Tensor, sub_min: Tensor) -> list[Tensor]:
    first, second = (field[..., :4] | ((field[..., 4:] >> 4) << 6) for field in (sub, sub_min))
    return [first, second, (sub[..., 4:] & 15) | ((sub_min[..., 4:] & 15) << 4)]


def _split_scales(first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
    import torch

    sub = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], -1)
    sub_min = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], -1)
    return sub, sub_min


FORMATS = [
    Q2K(name="q2_k", about="2 bits, scales and minima", levels=consecutive(0, 3), fields=(16, 64, 2, 2), largest=15),
    Q45K(name="q4_k", about="4 bits, scales and minima", levels=consecutive(0, 15), fields=(2, 2, 4, 4, 4, 128), largest=63),
    Q45K(name="q5_k", about="5 bits, scales and minima", levels=consecutive(0, 31), fields=(2, 2, 4, 4, 4, 32, 128), largest=63),
]
