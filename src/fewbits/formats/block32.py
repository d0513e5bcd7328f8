"""GGUF's blocks of 32 under one float16 scale d, some with a float16 minimum m. Layout, little-endian:

q4_0    18 bytes: d @0, nibbles[16] @2 (byte j: element j low, j+16 high; stored as q + 8)
q4_1    20 bytes: d @0, m @2, nibbles @4.                      w = d * q + m
q5_0    22 bytes: d @0, top[4] @2 (bit j % 8 of byte j / 8: fifth bit of element j), nibbles @6; stored as q + 16
q5_1    24 bytes: d @0, m @2, top @4, nibbles @8.              w = d * q + m
q8_0    34 bytes: d @0, int8[32] @2
iq4_nl  18 bytes: as q4_0, the nibble an index into 16 levels that lie closer together around zero
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbits.formats.blocks import OneScale, ScaleAndMin, consecutive

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.formats import Grid

NON_LINEAR = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)


@dataclass(frozen=True, kw_only=True)
class Scaled(OneScale):
    group: int = 32
    block: int = 32

    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        from fewbits.formats.storage.bitfields import float16_bytes

        return [float16_bytes(grid["d"]), *_code_fields(codes, len(self.fields) - 1, self.fields[-1])]

    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]:
        from fewbits.formats.storage.bitfields import bytes_float16

        return _codes_of(*fields[1:]), {"d": bytes_float16(fields[0])}


@dataclass(frozen=True, kw_only=True)
class Shifted(ScaleAndMin):
    group: int = 32
    block: int = 32

    def to_fields(self, codes: Tensor, grid: Grid) -> list[Tensor]:
        from fewbits.formats.storage.bitfields import float16_bytes

        return [float16_bytes(grid["d"]), float16_bytes(grid["m"]), *_code_fields(codes, len(self.fields) - 2, self.fields[-1])]

    def from_fields(self, *fields: Tensor) -> tuple[Tensor, Grid]:
        from fewbits.formats.storage.bitfields import bytes_float16

        return _codes_of(*fields[2:]), {"d": bytes_float16(fields[0]), "m": bytes_float16(fields[1])}


def _code_fields(codes: Tensor, count: int, last_bytes: int) -> list[Tensor]:
    from fewbits.formats.storage.bitfields import halves, join

    if last_bytes == 32:
        return [codes - 128]  # uint8 wraps: this is int8's byte
    if count == 1:
        return [halves(codes)]
    fifth = (codes >> 4).unflatten(-1, (4, 8)).transpose(-1, -2)
    return [join(fifth, 1), halves(codes & 15)]


def _codes_of(*fields: Tensor) -> Tensor:
    from fewbits.formats.storage.bitfields import split, unhalve

    if fields[-1].shape[-1] == 32:
        return fields[-1] + 128
    if len(fields) == 1:
        return unhalve(fields[0])
    return unhalve(fields[1]) | (split(fields[0], 1).transpose(-1, -2).flatten(-2) << 4)


FORMATS = [
    Scaled(name="q4_0", about="4 bits, one scale per 32", levels=consecutive(-8, 7), fields=(2, 16), ends=(-8.0, 7.0)),
    Scaled(name="iq4_nl", about="4 bits, uneven levels", levels=NON_LINEAR, fields=(2, 16), ends=(-127.0, 113.0)),
    Shifted(name="q4_1", about="4 bits, scale and minimum", levels=consecutive(0, 15), fields=(2, 2, 16)),
    Scaled(name="q5_0", about="5 bits, one scale per 32", levels=consecutive(-16, 15), fields=(2, 4, 16), ends=(-16.0, 15.0)),
    Shifted(name="q5_1", about="5 bits, scale and minimum", levels=consecutive(0, 31), fields=(2, 2, 4, 16)),
    Scaled(name="q8_0", about="8 bits, one scale per 32", levels=consecutive(-128, 127), fields=(2, 32), ends=(127.0,)),
]
