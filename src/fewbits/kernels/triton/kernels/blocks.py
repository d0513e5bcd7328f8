"""GGUF's blocks under one float16 scale d, some with a minimum m: q4_0, q8_0, q4_1, q5_0, q5_1, iq4_nl, and tq1_0 and tq2_0 with 256
columns a block.

layout   the blocks of 18, 34 ... bytes are split up: behind 2 bytes of scale the 16 bytes of codes start at no multiple of 4, so a lane
         could load only 2 bytes at once. Codes go into planes (layout.py), d and m into float16 (blocks, rows)
bytes    as stored: q4_0 and iq4_nl 0.563 per weight, q8_0 1.063, q5_0 0.688. tq1_0 grows from 0.211 to 0.258: five codes
         in a byte would need a division
bound    memory up to 20 to 120 tokens, by the GPU (docs/kernels.md); tile_shapes.csv has the shapes
weights  d * level (+ m); 5 bits of code times 11 bits of d are exact, the sum with m rounds once, fused or not
"""

from __future__ import annotations

import triton
import triton.language as tl

from fewbits.kernels.triton.kernels.decode import entry


@triton.jit
def affine_with_minima(entries, n, inside, rows, k, j, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    d = entry(entries[0], n, inside, rows, k, j, GROUP, WIDTH).to(tl.float32)
    return d, entry(entries[1], n, inside, rows, k, j, GROUP, WIDTH).to(tl.float32)
