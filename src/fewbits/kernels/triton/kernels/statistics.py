"""Calibration statistics of an activation in one kernel: minimum, maximum, mean square, and the histogram of `calibration.histogram`.

layout   x of any shape and float type, contiguous. A program reads 65,536 values and writes 4,096 counts and five numbers
bytes    2 per value from memory, once: the second pass over a program's 128 KB reads the second-level cache. 16 KB of counts per 128 KB
bound    memory
tiles    2,048 values at a time on 8 warps (512 on 16 where registers would spill): tile_shapes.csv
range    a program's bins span the least power of two above its values, so no range is needed beforehand. Bins of powers of two merge
         exactly: the result depends on the values alone. Values are divided by that power before they are squared, so that squares
         neither overflow nor vanish
careful  lanes beyond the end of x must not take part in minimum and maximum, because their zeros could be either. NaN and infinity are
         counted, but not binned
"""

from __future__ import annotations

import triton
import triton.language as tl

SMALLEST = tl.constexpr(-100)  # as in calibration.histogram


@triton.jit
def observe(x, counts, exponents, lows, highs, squares, broken, n, SEGMENT: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    start = program * SEGMENT
    i = tl.arange(0, BLOCK)
    low, high = tl.full((BLOCK,), float("inf"), tl.float32), tl.full((BLOCK,), float("-inf"), tl.float32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, SEGMENT, BLOCK):
        at = start + first + i
        values = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        finite = (values.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
        good = (at < n) & finite
        low, high = tl.minimum(low, tl.where(good, values, float("inf"))), tl.maximum(high, tl.where(good, values, float("-inf")))
        bad += tl.where((at < n) & (finite == 0), 1, 0)
    least, most = tl.min(low, 0), tl.max(high, 0)
    reach = tl.maximum(tl.maximum(-least, most), 0.0)  # 0 if there is nothing but NaN
    exponent = tl.maximum((reach.to(tl.int32, bitcast=True) >> 23) - 126, SMALLEST)
    # 2^(11 - exponent), made of its bits
    to_bins = ((138 - exponent) << 23).to(tl.float32, bitcast=True)
    total = tl.zeros((BLOCK,), tl.float32)
    binned = tl.zeros((BINS,), tl.int32)
    for first in range(0, SEGMENT, BLOCK):
        at = start + first + i
        values = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        bits = values.to(tl.int32, bitcast=True)
        good = (at < n) & ((bits & 0x7FFFFFFF) < 0x7F800000)
        scaled = tl.where(good, tl.abs(values) * to_bins, 0.0)
        magnitude = scaled.to(tl.int32)
        negative = (bits < 0) & ((bits & 0x7FFFFFFF) != 0)  # -0 counts as zero
        binned += tl.histogram(tl.where(negative, BINS // 2 - 1 - magnitude, BINS // 2 + magnitude), BINS, mask=good)
        share = scaled * (2.0 / BINS)  # relative to the reach
        total += share * share
    tl.store(counts + program * BINS + tl.arange(0, BINS), binned)
    tl.store(exponents + program, exponent)
    tl.store(lows + program, least)
    tl.store(highs + program, most)
    tl.store(squares + program, tl.sum(total, 0))
    tl.store(broken + program, tl.sum(bad, 0))
