"""Integers of 2 to 8 bits under a float16 scale per group, row or weight: int4_g128, int8_channel, int4_g32_asym ...

layout   planes of codes (layout.py); scales float16 (groups, rows); zeros, where the format has them, uint8 (groups, rows): half a byte
         more per group than the format's 4-bit stream, but one load for 32 rows instead of a shift that depends on the group
bytes    bits / 8 + 2 / group (+ 1 / group with zeros): int4_g128 0.516 per weight, int4_g32 0.563, int8_channel 1.0
bound    memory up to 20 to 120 tokens, by the GPU (docs/kernels.md), then compute: tile_shapes.csv has the shapes for each
weights  scale * (code + first), or scale * code - scale * zero: 11 bits times 8 are exact in float32, so both equal the reference exactly
"""

from __future__ import annotations

import triton
import triton.language as tl

from fewbits.kernels.triton.kernels.decode import entry, to_float


@triton.jit
def affine(entries, n, inside, rows, k, j, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    return entry(entries[0], n, inside, rows, k, j, GROUP, WIDTH).to(tl.float32), None


@triton.jit
def affine_with_zeros(entries, n, inside, rows, k, j, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    scale = entry(entries[0], n, inside, rows, k, j, GROUP, WIDTH).to(tl.float32)
    return scale, -scale * to_float(entry(entries[1], n, inside, rows, k, j, GROUP, WIDTH).to(tl.int32))
