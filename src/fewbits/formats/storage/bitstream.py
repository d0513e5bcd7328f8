"""Fields of 1 to 8 bits as a plain little-endian stream: field i of a row begins at bit (width * i), lowest bit first.

Every `8 / gcd(8, width)` fields begin at a byte again; within such a period each byte has bits of a few fields at most, so
all is done in uint8 on strided views, without an array of single bits, which would be eight times the size.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor


def period(width: int) -> int:
    """The least number of fields that fill whole bytes: 3 bits -> 8, 4 -> 2, 6 -> 4, 8 -> 1."""
    return 8 // gcd(8, width)


def pack(fields: Tensor, width: int) -> Tensor:
    """(rows, n) uint8 fields -> (rows, ceil(n * width / 8)) bytes; the last byte of a row is filled up with zero bits."""
    rows, n = fields.shape
    step, octets = period(width), width * period(width) // 8
    short = -n % step
    whole = torch.cat([fields, fields.new_zeros(rows, short)], 1) if short else fields
    stream = fields.new_zeros(rows, whole.shape[1] // step, octets)
    for i in range(step):
        field = whole[:, i::step]
        for j, shift in _places(i, width):
            stream[..., j] |= field << shift if shift >= 0 else field >> -shift  # uint8: what overflows belongs to the next byte
    return stream.reshape(rows, -1)[:, : -(-n * width // 8)].contiguous()


def unpack(stream: Tensor, width: int, n: int) -> Tensor:
    """The first n fields of each row."""
    rows, step, octets = len(stream), period(width), width * period(width) // 8
    short = -stream.shape[1] % octets
    whole = torch.cat([stream, stream.new_zeros(rows, short)], 1) if short else stream
    groups = whole.reshape(rows, -1, octets)
    fields = stream.new_zeros(rows, groups.shape[1], step)
    for i in range(step):
        for j, shift in _places(i, width):
            fields[..., i] |= groups[..., j] >> shift if shift >= 0 else groups[..., j] << -shift
    return (fields & (1 << width) - 1).reshape(rows, -1)[:, :n].contiguous()


def _places(i: int, width: int) -> list[tuple[int, int]]:
    """(byte, left shift into it) of every byte that holds a bit of field i of a period."""
    first, last = i * width // 8, (i * width + width - 1) // 8
    return [(j, i * width - 8 * j) for j in range(first, last + 1)]
