"""4-bit floats (e2m1) under scales that are 8-bit floats: mxfp4, nvfp4, nvfp4_tensor.

layout   a plane of 4 bits (layout.py); scale bytes (blocks, rows): E8M0 for each 32 columns, or UE4M3 for each 16; the factor of
         nvfp4_tensor once per row
bytes    mxfp4 0.531 per weight, nvfp4 0.563: as stored. Blocks of 17 bytes, as stored, would be loaded byte by byte
bound    memory up to 20 to 120 tokens, by the GPU (docs/kernels.md); tile_shapes.csv has the shapes. Blackwell's tensor cores multiply
         both types without decoding, but that path (tl.dot_scaled) rounds activations to 8 bits or fewer: a different product
weights  scale * level: exact, except for nvfp4_tensor's factor, which rounds once as the reference does
"""

from __future__ import annotations

import triton
import triton.language as tl

from fewbits.kernels.triton.kernels.decode import e4m3, e8m0, entry


@triton.jit
def affine_powers(entries, n, inside, rows, k, j, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    return e8m0(entry(entries[0], n, inside, rows, k, j, GROUP, WIDTH).to(tl.int32)), None


@triton.jit
def affine(entries, n, inside, rows, k, j, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    return e4m3(entry(entries[0], n, inside, rows, k, j, GROUP, WIDTH).to(tl.int32) & 127), None


@triton.jit
def affine_with_factor(entries, n, inside, rows, k, j, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    scale = e4m3(entry(entries[0], n, inside, rows, k, j, GROUP, WIDTH).to(tl.int32) & 127)
    return scale * entry(entries[1], n, inside, rows, k, j, 0, WIDTH), None
