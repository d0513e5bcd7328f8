"""GGUF's blocks of 256 with three or four levels: w = d * level, one float16 d. Layout:

    tq1_0  54 bytes: five codes per byte in [32] @0 (byte l: l, l+32 .. l+128) and [16] @32 (byte l: 160+l, 176+l ..), four in
           [4] @48 (byte l: 240+l, 244+l ..), d @52.  level = q - 1, q in 0..2
    tq2_0  66 bytes: codes[64] @0 (per 128: byte l holds l, l+32, l+64, l+96), d @64.  level = q - 1, q in 0..3

A tq1_0 byte is ceil(256/243 * (81a + 27b + 9c + 3d + e)): a fixed-point fraction, so that multiplying it by 3 pushes out one
code after the other. tq2_0 has room for a fourth level, 2; ggml's quantizer does not use it, but all its decoders read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats.blocks import OneScale, consecutive

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Grid


@dataclass(frozen=True, kw_only=True)
class Tq1(OneScale):
    group: int = 256
    block: int = 256

    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        from fewbits.formats.storage.bitfields import float16_bytes

        fields = [
            codes[..., :160].unflatten(-1, (5, 32)),
            codes[..., 160:240].unflatten(-1, (5, 16)),
            codes[..., 240:].unflatten(-1, (4, 4)),
        ]
        return [*map(_join_trits, fields), float16_bytes(grid["d"])]

    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]:
        import torch

        from fewbits.formats.storage.bitfields import bytes_float16

        first, second, last, d = fields
        codes = torch.cat([_split_trits(first, 5), _split_trits(second, 5), _split_trits(last, 4)], -1)
        return codes, {"d": bytes_float16(d)}


@dataclass(frozen=True, kw_only=True)
class Tq2(OneScale):
    group: int = 256
    block: int = 256

    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        from fewbits.formats.storage.bitfields import float16_bytes, join

        return [join(codes.unflatten(-1, (2, 4, 32)), 2).flatten(-2), float16_bytes(grid["d"])]

    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]:
        from fewbits.formats.storage.bitfields import bytes_float16, split

        return split(fields[0].unflatten(-1, (2, 32)), 2).flatten(-3), {"d": bytes_float16(fields[1])}


def _join_trits(codes: Tensor) -> Tensor:  # (..., 4 or 5, n) -> (..., n) bytes
    import torch

    places = torch.tensor([81, 27, 9, 3, 1][: codes.shape[-2]], dtype=torch.int32).unsqueeze(-1)
    number = (codes.int() * places).sum(-2)
    return ((number * 256 + 242) // 243).to(torch.uint8)


def _split_trits(packed: Tensor, count: int) -> Tensor:  # (..., n) bytes -> (..., count * n)
    import torch

    fractions = torch.stack([packed * 3**i for i in range(count)], -2)  # uint8 wraps: the codes already taken fall off
    return ((fractions.short() * 3) >> 8).to(torch.uint8).flatten(-2)


FORMATS = [
    Tq1(name="tq1_0", about="3 levels, a scale per 256", levels=consecutive(-1, 1), fields=(32, 16, 4, 2), ends=(1.0,)),
    Tq2(name="tq2_0", about="2 bits, a scale per 256", levels=consecutive(-1, 2), fields=(64, 2), ends=(1.0, 2.0, -1.0)),
]
