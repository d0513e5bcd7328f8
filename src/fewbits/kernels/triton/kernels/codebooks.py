"""GGUF's codebook types, whose codes stand for eight weights: iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s.

layout   a lane has 32 columns of a row, four vectors, and reads a number or two from each of a few arrays (tiles, rows, numbers of a tile):
         eight lanes read 32 bytes of one row, a warp 128 bytes in one run. A row's blocks, as stored, begin at no multiple of 4.
         `low` int32: the lower byte of four indices. `second` int32: the same of the second point, where a point has four weights.
         `signs` int32: seven for each vector, and four bits of something else above them; or eight. `high`: the rest of the indices.
         `sub`: scales of 3 or 4 bits, in bytes or above other bits. d: float16. repack_points.py puts the bits there
bytes    as stored, to the bit: iq1_s 0.195 per weight, iq1_m 0.219, iq2_xxs 0.258, iq2_xs 0.289, iq2_s 0.320, iq3_xxs 0.383, iq3_s 0.430.
         The table of points beside them has 1 KB (iq3_xxs) to 16 KB (iq1) and is read from the first-level cache
bound    for one token instructions, on an A100 or H100: 6 to 9 per weight take longer than memory needs for 2 bits (docs/kernels.md).
         Levels of 3 bits in planes would take fewer, and 1.5 times the memory, which is what these types are chosen for. tile_shapes.csv
         has the shapes, under 0 bits
weights  d * sub * unit * whole number, and d * sub * point + d * sub * shift of iq1_s: 11 bits times 5 times 6 are exact in float32

A function here fetches 32 columns, the number `group` of eight in a tile: (low, second, high, signs) as points.py wants them, the scale of
the first 16 columns and of the others (None: the same), the offset. n and inside are (rows, 1), group a number or (1, 8).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fewbits.kernels.triton.kernels.decode import to_float
from fewbits.kernels.triton.kernels.super_blocks import half_of


@triton.jit
def iq1_s(entries, n, inside, rows, tile, group):
    """high: 12 bits of indices, the scale (3), the shift (1: down)."""
    low = _of(entries[0], tile, group, n, inside, rows, 8)
    high = _of(entries[1], tile, group, n, inside, rows, 8).to(tl.int32)
    scale = _of(entries[2], tile, group, n, inside, rows, 1).to(tl.float32) * _odd(high >> 12, 7)
    return (low, None, high, None), scale, None, tl.where(high & 0x8000 != 0, scale * -0.125, scale * 0.125)


@triton.jit
def iq1_m(entries, n, inside, rows, tile, group):
    """high: of four vectors three bits of the index and the shift. sub: for 256 columns d and above it sixteen scales of 3 bits."""
    low = _of(entries[0], tile, group, n, inside, rows, 8)
    high = _of(entries[1], tile, group, n, inside, rows, 8).to(tl.int32)
    scales = _of(entries[2], tile, group, n, inside, rows, 1)
    two = (scales >> (16 + 6 * group)).to(tl.int32)
    d = half_of(scales) * 0.125
    return (low, None, high, None), d * _odd(two, 7), d * _odd(two >> 3, 7), None


@triton.jit
def iq2_xxs(entries, n, inside, rows, tile, group):
    """The uppermost bits of signs: the scale."""
    low, signs = _of(entries[0], tile, group, n, inside, rows, 8), _of(entries[1], tile, group, n, inside, rows, 8)
    scale = _of(entries[2], tile, group, n, inside, rows, 1).to(tl.float32) * 0.125 * _odd(signs >> 28, 15)
    return (low, None, None, signs), scale, None, None


@triton.jit
def iq2_xs(entries, n, inside, rows, tile, group):
    """The uppermost bits of signs: the ninth of four indices."""
    low, signs = _of(entries[0], tile, group, n, inside, rows, 8), _of(entries[1], tile, group, n, inside, rows, 8)
    two = _of(entries[2], tile, group, n, inside, rows, 8).to(tl.int32)
    d = _of(entries[3], tile, group, n, inside, rows, 1).to(tl.float32) * 0.125
    return (low, None, (signs >> 28) & 15, signs), d * _odd(two, 15), d * _odd(two >> 4, 15), None


@triton.jit
def iq2_s(entries, n, inside, rows, tile, group):
    low, signs = _of(entries[0], tile, group, n, inside, rows, 8), _of(entries[1], tile, group, n, inside, rows, 8)
    high, two = _of(entries[2], tile, group, n, inside, rows, 8).to(tl.int32), _of(entries[3], tile, group, n, inside, rows, 8).to(tl.int32)
    d = _of(entries[4], tile, group, n, inside, rows, 1).to(tl.float32) * 0.125
    return (low, None, high, signs), d * _odd(two, 15), d * _odd(two >> 4, 15), None


@triton.jit
def iq3_xxs(entries, n, inside, rows, tile, group):
    """The uppermost bits of signs: the scale."""
    low, second = _of(entries[0], tile, group, n, inside, rows, 8), _of(entries[1], tile, group, n, inside, rows, 8)
    signs = _of(entries[2], tile, group, n, inside, rows, 8)
    scale = _of(entries[3], tile, group, n, inside, rows, 1).to(tl.float32) * 0.25 * _odd(signs >> 28, 15)
    return (low, second, None, signs), scale, None, None


@triton.jit
def iq3_s(entries, n, inside, rows, tile, group):
    """sub: two scales for 64 columns."""
    low, second = _of(entries[0], tile, group, n, inside, rows, 8), _of(entries[1], tile, group, n, inside, rows, 8)
    signs, high = _of(entries[2], tile, group, n, inside, rows, 8), _of(entries[3], tile, group, n, inside, rows, 8).to(tl.int32)
    two = _of(entries[4], tile, group, n, inside, rows, 4).to(tl.int32)
    scale = _of(entries[5], tile, group, n, inside, rows, 1).to(tl.float32) * _odd(two >> (4 * (group % 2)), 15)
    return (low, second, high, signs), scale, None, None


@triton.jit
def _of(array, tile, group, n, inside, rows, PER_TILE: tl.constexpr):
    """The entry of the group's columns; an array has PER_TILE of them for each row, side by side.

    The compiler is not to see that they are: it would give a lane four of them, then exchange indices between lanes for the look-up of
    points, each of which is a load of its own: 28 barriers per tile."""
    where = (tile * rows + n) * PER_TILE + group // (8 // PER_TILE)
    return tl.load(array + tl.max_contiguous(where, [1, 1]), mask=inside, other=0)


@triton.jit
def _odd(bits, MASK: tl.constexpr):
    """A scale s stands for 2s + 1."""
    return to_float(((bits & MASK) << 1) | 1)
