"""int8 activations times int8 weights, and the kernel that rounds the activations, after an RMSNorm if one is given.

layout   x int8 (tokens, cols), w int8 (rows, cols), both as torch stores them, without repacking: rows are contiguous
bytes    1 per weight. Rounding reads x once (2 bytes) and writes 1 byte per value and 4 per token; a separate norm would write and read
         4 more
bound    the product: memory up to 100 tokens or so, then the tensor cores' int8 rate, twice that of float16. Rounding: memory
tiles    the product: 64 or 128 rows by 16 to 128 tokens by 64 columns, per architecture and batch in tile_shapes.csv. Rounding: a whole row
sums     32 bits, exact: 65536 columns of 127 * 127 stay below 2^31; then one scale per token times one per row, and the bias, in float32
norm     y = x / sqrt(mean(x^2) + eps) * weight; without a norm y is x
rounding a token's scale is its largest |y| over 127. One program per token holds the whole row in registers, so there is no second pass. A
         token with a NaN or an infinity has scale NaN and codes 0; one of zeros has scale 0 and codes 0
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_and_quantize(x, weight, codes, scales, cols, eps, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < cols
    values = tl.load(x + token * cols + k, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        mean_square = tl.sum(values * values, 0) / cols
        values = values * tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps)) * tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
    # x - x is 0, or NaN where x is not finite: their sum finds such a value without a second maximum
    broken = tl.sum(values - values, 0)
    scale = tl.div_rn(tl.max(tl.abs(values), 0), 127.0) + broken
    divisor = tl.where(scale > 0, scale, 1.0)
    quotient = tl.div_rn(values, divisor + tl.zeros_like(values))
    quotient = tl.where(scale > 0, quotient, 0.0)
    quotient = tl.minimum(tl.maximum(quotient, -127.0), 127.0)  # a subnormal scale is so coarse that quotients exceed 127
    rounded = (quotient + 12582912.0) - 12582912.0  # rounds half to even: 1.5 * 2^23 leaves no bit for a fraction
    tl.store(codes + token * cols + k, rounded.to(tl.int8), mask=inside)
    tl.store(scales + token, scale)


@triton.jit
def integer_product(
    x, x_scale, w, w_scale, bias, out, tokens, rows, cols, ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    j = tl.arange(0, WIDTH)
    inside, there = n < rows, m < tokens
    w_start, x_start = n.to(tl.int64) * cols, m.to(tl.int64) * cols
    sums = tl.zeros((ROWS, TOKENS), tl.int32)
    for k in range(0, cols, WIDTH):
        columns = k + j
        left = tl.load(w + w_start[:, None] + columns[None, :], mask=inside[:, None] & (columns < cols)[None, :], other=0)
        right = tl.load(x + x_start[None, :] + columns[:, None], mask=there[None, :] & (columns < cols)[:, None], other=0)
        sums = tl.dot(left, right, sums)
    scale = tl.load(w_scale + n, mask=inside, other=0.0).to(tl.float32)[:, None] * tl.load(x_scale + m, mask=there, other=0.0)[None, :]
    result = sums.to(tl.float32) * scale
    if bias is not None:
        result += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    where = m.to(tl.int64)[None, :] * rows + n[:, None]
    tl.store(out + where, result.to(out.dtype.element_ty), mask=there[None, :] & inside[:, None])
