"""GGUF's super-blocks of 256 whose scales are integers under float16: q2_k, q3_k, q4_k, q5_k, q6_k, iq4_xs, and q3_s6.

layout   planes of codes (layout.py): q6_k is a plane of 4 bits and one of 2, q3_k of 2 and 1. d and dmin float16 (super-blocks, rows),
         scales and minima one byte each (sub-blocks, rows), a minimum and its scale in one entry. The format packs them into 6 bits
         across bytes, and a lane would have to fetch and join three bytes for each of its rows
bytes    q4_k 0.578 per weight (0.563 stored), q6_k 0.820 (as stored), q3_k 0.445 (0.430), q5_k 0.703 (0.688), q2_k 0.391 (0.328)
bound    memory up to 20 to 120 tokens, by the GPU; the sub-blocks of 16 of q6_k and q3_k cost one select per weight more than those of 32.
         tile_shapes.csv has the shapes
weights  d * sub * level, or d * sub * code - dmin * sub_min: 11 bits times 7 times 6 are exact in float32, the difference rounds once
"""

from __future__ import annotations

import triton
import triton.language as tl

from fewbits.kernels.triton.kernels.decode import TILE, entry, to_float


@triton.jit
def affine(entries, n, inside, rows, k, j, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    d = entry(entries[0], n, inside, rows, k, j, TILE, WIDTH).to(tl.float32)
    return d * entry(entries[1], n, inside, rows, k, j, GROUP, WIDTH).to(tl.float32), None


@triton.jit
def affine_with_minima(entries, n, inside, rows, k, j, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    halves = entry(entries[0], n, inside, rows, k, j, TILE, WIDTH)
    octets = entry(entries[1], n, inside, rows, k, j, GROUP, WIDTH).to(tl.int32)
    scale = half_of(halves) * to_float(octets & 255)
    return scale, -(half_of(halves >> 16) * to_float((octets >> 8) & 255))


@triton.jit
def half_of(word):
    """The lower 16 bits as a float16."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
