"""GGUF's super-blocks of 256 whose sub-block scales are integers under one float16 d: w = d * scale * level. Layout:

    q3_k    110 bytes: top[32] @0 (bit i of byte l: third bit of element 32i+l), low[64] @32 (per 128: byte l holds the low
            two bits of l, l+32, l+64, l+96), sixteen 6-bit scales[12] @96 (stored + 32), d @108.  level = q - 4
    q6_k    210 bytes: low[128] @0 (per 128: byte l of 64 holds the low four bits of l and l+64), top[64] @128 (as q3_k's low),
            int8 scales[16] @192, d @208.  level = q - 32

K stands for these super-blocks; no k-means is involved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats.blocks import SubScales, consecutive

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Grid


@dataclass(frozen=True, kw_only=True)
class Q3K(SubScales):
    group: int = 16
    block: int = 256

    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        import torch

        from fewbits.formats.storage.bitfields import float16_bytes, halves, join

        top = join((codes >> 2).unflatten(-1, (8, 32)), 1)
        low = join((codes & 3).unflatten(-1, (2, 4, 32)), 2).flatten(-2)
        scale = (grid["sub"].short() + 32).to(torch.uint8)
        scales = [halves(scale & 15), join((scale >> 4).unflatten(-1, (4, 4)), 2)]
        return [top, low, *scales, float16_bytes(grid["d"])]

    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]:
        import torch

        from fewbits.formats.storage.bitfields import bytes_float16, split, unhalve

        top, low, scale_low, scale_top, d = fields
        codes = split(low.unflatten(-1, (2, 32)), 2).flatten(-3) | (split(top, 1).flatten(-2) << 2)
        scale = unhalve(scale_low) | (split(scale_top, 2).flatten(-2) << 4)
        return codes, {"sub": (scale.short() - 32).to(torch.int8), "d": bytes_float16(d)}


@dataclass(frozen=True, kw_only=True)
class Q6K(SubScales):
    group: int = 16
    block: int = 256

    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        import torch

        from fewbits.formats.storage.bitfields import float16_bytes, join

        low = join((codes & 15).unflatten(-1, (2, 2, 64)), 4).flatten(-2)
        top = join((codes >> 4).unflatten(-1, (2, 4, 32)), 2).flatten(-2)
        return [low, top, grid["sub"].contiguous().view(torch.uint8), float16_bytes(grid["d"])]

    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]:
        import torch

        from fewbits.formats.storage.bitfields import bytes_float16, split

        low, top, sub, d = fields
        codes = split(low.unflatten(-1, (2, 64)), 4).flatten(-3) | (split(top.unflatten(-1, (2, 32)), 2).flatten(-3) << 4)
        return codes, {"sub": sub.view(torch.int8), "d": bytes_float16(d)}


FORMATS = [
    Q3K(
        name="q3_k",
        about="3 bits, 6-bit scales",
        levels=consecutive(-4, 3),
        fields=(32, 64, 8, 4, 2),
        ends=(-4.0, 3.0),
        integers=range(-32, 32),
    ),
    Q6K(
        name="q6_k",
        about="6 bits, 8-bit scales",
        levels=consecutive(-32, 31),
        fields=(128, 64, 16, 2),
        ends=(-32.0, 31.0),
        integers=range(-128, 128),
    ),
]
