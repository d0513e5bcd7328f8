"""Converts codes that stand for vectors into the arrays that kernels/codebooks.py reads, and back; and makes the tables of points.

Between the two, a weight is four vectors of eight weights for each 32 columns: for every vector the indices of its one or two points and
the bits above them (signs, or a shift).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewbits.formats import Format
from fewbits.formats.storage.grids import grid as points_of
from fewbits.kernels.triton.codebooks import BY_GRID, Points
from fewbits.kernels.triton.layout import TILE

if TYPE_CHECKING:
    from fewbits.formats import Grid


@cache
def table(name: str, device: torch.device | str) -> Tensor:
    """The points of a grid, a byte for each weight: + 128, in eighths where the kernel adds a shift of an eighth. int64, or int32 where a
    point has four weights."""
    unit = 8 if BY_GRID[name].signs == "shifted" else 1
    octets = (points_of(name) * unit + 128).to(torch.uint8)
    return octets.view(torch.int64 if octets.shape[1] == 8 else torch.int32).flatten().to(device)


def to_arrays(fmt: Format, codes: Tensor, grid: Grid) -> tuple[Tensor, ...]:
    """(tiles, rows, entries of a tile) each."""
    kind = BY_GRID[fmt.name]
    first, second, above = _vectors(fmt, codes)
    made = {"low": _join(first & 255, 8), "d": grid["d"]}
    sub = grid["sub"].long() >> 1  # the scale as stored: sub is odd
    upper = first >> 8
    if kind.signs == "shifted":
        upper |= above << 3
    if second is not None:
        made["second"] = _join(second & 255, 8)
        upper |= (second >> 8) << 1
    high = _join(upper, kind.high)
    signs = _join(above & 127, 7) if kind.signs == "even" else _join(above, 8)
    if kind.high_above_the_signs:
        signs |= high << 28
    if kind.scales == "above the signs":
        signs |= sub << 28
    elif kind.scales == "above the indices":
        high |= sub << 12 | (grid["shift"] < 0).long() << 15
    elif kind.scales == "above d":
        places = 16 + 3 * torch.arange(16)
        d = grid["d"].contiguous().view(torch.int16).long() & 0xFFFF
        made["sub"] = (sub.unflatten(1, (-1, 16)) << places).sum(-1) | d
    else:
        made["sub"] = sub[:, 0::2] | sub[:, 1::2] << 4
    made |= {"signs": signs, "high": high}
    return tuple(
        made[name].to(getattr(torch, dtype)).unflatten(1, (-1, TILE // columns)).transpose(0, 1).contiguous()
        for name, columns, dtype in kind.arrays
    )


def from_arrays(fmt: Format, arrays: tuple[Tensor, ...]) -> tuple[Tensor, Grid]:
    kind = BY_GRID[fmt.name]
    stored = {name: array.cpu().transpose(0, 1).flatten(1) for (name, _, _), array in zip(kind.arrays, arrays, strict=True)}
    grid: Grid = {"d": stored["d"]} if "d" in stored else {}
    words = {name: array.long() for name, array in stored.items() if name != "d"}
    high = words["signs"] >> 28 if kind.high_above_the_signs else words.get("high", torch.zeros_like(words["low"]))
    if kind.scales == "above the signs":
        sub = words["signs"] >> 28 & 15
    elif kind.scales == "above the indices":
        sub, grid["shift"] = high >> 12 & 7, (1 - 2 * (high >> 15 & 1)).to(torch.int8)
    elif kind.scales == "above d":
        sub = (words["sub"].unsqueeze(-1) >> (16 + 3 * torch.arange(16)) & 7).flatten(1)
        grid["d"] = words["sub"].to(torch.int16).view(torch.float16)
    else:
        sub = torch.stack([words["sub"] & 15, words["sub"] >> 4], -1).flatten(1)
    grid["sub"] = (2 * sub + 1).to(torch.int8)
    return _codes(fmt, kind, words, high), grid


def _vectors(fmt: Format, codes: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """(rows, cols / 8) each: the index of the first point, that of the second, and the bits above the indices."""
    bits, mask, wide = _index_bits(fmt), (1 << _index_bits(fmt)) - 1, codes.long()
    if fmt.dimension == 4:  # two codes
        one, two = wide[:, 0::2], wide[:, 1::2]
        return one & mask, two & mask, one >> bits | (two >> bits) << 4
    if BY_GRID[fmt.name].width == 4:
        return wide & mask, wide >> bits & mask, wide >> (2 * bits)
    return wide & mask, None, wide >> bits


def _codes(fmt: Format, kind: Points, words: Grid, high: Tensor) -> Tensor:
    bits, upper = _index_bits(fmt), _split(high, kind.high)
    first = _split(words["low"], 8) | (upper & (1 if kind.width == 4 else 7)) << 8
    above = torch.zeros_like(first)
    if kind.signs == "shifted":
        above = upper >> 3
    elif kind.signs == "even":
        above = _split(words["signs"], 7)
        for bit in range(7):
            above = above ^ (above >> bit & 1) << 7
    elif kind.signs == "free":
        above = _split(words["signs"], 8)
    if kind.width == 8:
        return (first | above << bits).int()
    second = _split(words["second"], 8) | (upper >> 1) << 8
    if fmt.dimension == 8:
        return (first | second << bits | above << (2 * bits)).int()
    return torch.stack([first | (above & 15) << bits, second | (above >> 4) << bits], -1).flatten(1).int()


def _index_bits(fmt: Format) -> int:
    return (len(points_of(fmt.name)) - 1).bit_length()


def _join(numbers: Tensor, bits: int) -> Tensor:
    """(rows, 4n) -> (rows, n): four numbers of so many bits each, the first lowest."""
    shifted: Tensor = numbers.unflatten(1, (-1, 4)) << (bits * torch.arange(4))
    return shifted.sum(-1)


def _split(words: Tensor, bits: int) -> Tensor:
    """The opposite of `_join`."""
    numbers: Tensor = words.unsqueeze(-1) >> (bits * torch.arange(4)) & ((1 << bits) - 1)
    return numbers.flatten(1)
