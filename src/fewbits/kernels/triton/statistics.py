"""Calibration statistics of an activation in one kernel: least, largest, mean square, and a histogram as `calibration.histogram` has it.

layout   x in any shape and float type, contiguous. A program has 65,536 values; it writes 4,096 counts and five numbers
bytes    2 per value from memory, once: the second look at a program's 128 KB finds them in the second-level cache. 16 KB of counts for
         each 128 KB
bound    memory
tiles    2,048 values at a time on 8 warps (512 on 16 where registers would spill): tiles.csv
range    a program's bins span the least power of two above its own values, so no range is needed beforehand. Bins of powers of two merge
         exactly: the result depends on the values alone. Squares are of values divided by that power, which neither overflow nor vanish
careful  what lies outside x takes part in no minimum and no maximum: a zero there would be one. NaN and infinity are counted, not binned
"""

from __future__ import annotations

import triton
import triton.language as tl

SMALLEST = tl.constexpr(-100)  # as calibration.histogram.SMALLEST


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
    reach = tl.maximum(tl.maximum(-least, most), 0.0)  # of nothing but NaN: 0
    exponent = tl.maximum((reach.to(tl.int32, bitcast=True) >> 23) - 126, SMALLEST)
    # 2^(11 - exponent), and 2^-exponent, by their bits
    to_bins = ((138 - exponent) << 23).to(tl.float32, bitcast=True)
    total = tl.zeros((BLOCK,), tl.float32)
    found = tl.zeros((BINS,), tl.int32)
    for first in range(0, SEGMENT, BLOCK):
        at = start + first + i
        values = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        bits = values.to(tl.int32, bitcast=True)
        good = (at < n) & ((bits & 0x7FFFFFFF) < 0x7F800000)
        scaled = tl.where(good, tl.abs(values) * to_bins, 0.0)
        magnitude = scaled.to(tl.int32)
        negative = (bits < 0) & ((bits & 0x7FFFFFFF) != 0)  # -0 is no negative number
        found += tl.histogram(tl.where(negative, BINS // 2 - 1 - magnitude, BINS // 2 + magnitude), BINS, mask=good)
        share = scaled * (2.0 / BINS)  # of the reach
        total += share * share
    tl.store(counts + program * BINS + tl.arange(0, BINS), found)
    tl.store(exponents + program, exponent)
    tl.store(lows + program, least)
    tl.store(highs + program, most)
    tl.store(squares + program, tl.sum(total, 0))
    tl.store(broken + program, tl.sum(bad, 0))
