"""float8 weights with float8 activations (W8A8), multiplied without decoding. With float activations they are decoded: products.py.

layout   x e4m3 (tokens, cols), w e4m3 or e5m2 (rows, cols), as torch stores them, without repacking: rows are contiguous
bytes    1 per weight
bound    memory up to 100 tokens or so, then compute: from sm_89 on the tensor cores take float8 at twice the rate of float16
tiles    64 or 128 rows by 16 to 128 tokens by 64 columns, per architecture and batch in tile_shapes.csv
sums     float32. Hopper's float8 instruction keeps fewer bits while it adds, so its sums are added to float32 ones after every step of
         WIDTH columns
else     sm_80 and sm_86 have no e4m3, and gfx942 has a different one. There codes are decoded to float16, which is exact, and float16 is
         multiplied
decode   of weights alone: level(code) * scale with a float32 scale per row, by `integers.affine`; rounds once, as the reference does
scales   one per token and one per row, both float32; then the bias
"""

from __future__ import annotations

import triton
import triton.language as tl

from fewbits.kernels.triton.kernels.decode import e4m3, e5m2


@triton.jit
def product(
    x, x_scale, w, w_scale, bias, out, tokens, rows, cols,
    NATIVE: tl.constexpr, W_IS_E5M2: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Without NATIVE, x and w are given as uint8."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    j = tl.arange(0, WIDTH)
    inside, there = n < rows, m < tokens
    w_start, x_start = n.to(tl.int64) * cols, m.to(tl.int64) * cols
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for k in range(0, cols, WIDTH):
        columns = k + j
        kept_w, kept_x = inside[:, None] & (columns < cols)[None, :], there[None, :] & (columns < cols)[:, None]
        if NATIVE:
            left = tl.load(w + w_start[:, None] + columns[None, :], mask=kept_w, other=0.0)
            right = tl.load(x + x_start[None, :] + columns[:, None], mask=kept_x, other=0.0)
            sums = tl.dot(left, right, sums, max_num_imprecise_acc=WIDTH)
        else:
            w_code = tl.load(w + w_start[:, None] + columns[None, :], mask=kept_w, other=0).to(tl.int32)
            x_code = tl.load(x + x_start[None, :] + columns[:, None], mask=kept_x, other=0).to(tl.int32)
            left = (e5m2(w_code) if W_IS_E5M2 else e4m3(w_code)).to(tl.float16)
            sums = tl.dot(left, e4m3(x_code).to(tl.float16), sums)
    scale = tl.load(w_scale + n, mask=inside, other=0.0)[:, None] * tl.load(x_scale + m, mask=there, other=0.0)[None, :]
    result = sums * scale
    if bias is not None:
        result += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    where = m.to(tl.int64)[None, :] * rows + n[:, None]
    tl.store(out + where, result.to(out.dtype.element_ty), mask=there[None, :] & inside[:, None])


@triton.jit
def quantize(x, codes, scales, cols, BLOCK: tl.constexpr):
    """Activations to e4m3 codes as uint8; a token's largest value becomes 448. Rounded half to even with integer arithmetic, because GPUs
    below sm_89 have no conversion to e4m3."""
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < cols
    values = tl.load(x + token * cols + k, mask=inside, other=0.0).to(tl.float32)
    broken = tl.sum(values - values, 0)
    scale = tl.div_rn(tl.max(tl.abs(values), 0), 448.0) + broken
    quotient = tl.where(scale > 0, tl.div_rn(values, tl.where(scale > 0, scale, 1.0) + tl.zeros_like(values)), 0.0)
    tl.store(codes + token * cols + k, to_e4m3(quotient), mask=inside)
    tl.store(scales + token, scale)


@triton.jit
def to_e4m3(value):
    """float32 -> the code of the nearest e4m3, half to even, saturating at 448; NaN stays NaN."""
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # normal numbers: the exponent's bias goes from 127 to 7, the mantissa from 23 bits to 3
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6: steps of 2^-9
    tiny = ((tl.abs(value) * 512.0 + 8388608.0).to(tl.int32, bitcast=True)) & 0xFF
    code = tl.where(magnitude < 0x3C800000, tiny, tl.minimum(normal, 0x7E))
    return (sign | tl.where(magnitude > 0x7F800000, 0x7F, code)).to(tl.uint8)
