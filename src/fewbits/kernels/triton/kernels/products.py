"""Products of float activations with packed weights: one kernel for one token and one for many, each with any family's scales and offsets.

out = x @ w.T (+ bias) (+ residual): x (tokens, cols) float16 or bfloat16, w (rows, cols) packed, out (tokens, rows) in x's type.

one token    `vector`: a program has ROWS rows and reads their codes as words. Integers become floats at their place in a word, four
             columns share a multiplication by the scale, and a lane has several rows of the same columns, so that x is converted once
             for all of them: five instructions per weight, where decoding each weight separately took ten. Sums stay in their lanes
             until the end
several      `matrix`: weights are the left operand of the tensor cores, w (ROWS, cols) times x' (cols, TOKENS). Decoded weights then go
             from registers straight into the product (on Blackwell through its tensor memory), rows of codes and of x are
             both contiguous along columns, as the instruction wants them, and 64 or 128 rows fill an instruction however few tokens there
             are
split        SPLIT programs share the columns of a block; their float32 sums are added by `add_up` in one order, so that the same input
             gives the same bits. Atomic additions would save that launch and give other bits each time

For tensor cores weights are decoded to float32, bit for bit as the reference, and rounded once to x's type; for one token they are not
rounded. With tensor cores in float16 a weight beyond 65504 is therefore infinite, as it is when it is decoded to float16. NaN and infinity
in x affect all results of their token and of no other token; in a scale, all results of their row and of no other row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fewbits.kernels.triton.kernels.decode import TILE, codes, fours, level, level_in_place, words


@triton.jit
def weights(
    code, AFFINE: tl.constexpr, entries, n, inside, rows, k, j, GROUP: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """float32 weights of int32 codes: columns k + j of rows n."""
    scale, offset = AFFINE(entries, n, inside, rows, k, j, GROUP, WIDTH)
    w = level(code, KIND, FIRST) * scale
    if offset is not None:
        w += offset
    return w


@triton.jit
def place(s: tl.constexpr, B: tl.constexpr, KIND: tl.constexpr, LOW: tl.constexpr):
    """The inverse of the factor in a level from `level_in_place`: a power of two, so the product is exact."""
    SHIFT: tl.constexpr = 8 * (B % 2) + LOW * (s % (8 // LOW)) if KIND == "integers" else 0
    return 1.0 / (1 << SHIFT)


@triton.jit
def matrix(
    x, planes, entries, bias, residual, out, partial, tokens, rows, cols, tiles,
    AFFINE: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    SUBTILES: tl.constexpr = 8 // (HIGH if HIGH else LOW)
    SUBTILE: tl.constexpr = TILE // SUBTILES
    STEPS: tl.constexpr = SUBTILE // WIDTH
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    j = tl.arange(0, WIDTH)
    inside, there = n < rows, m < tokens
    n64 = n.to(tl.int64)
    x_start = m.to(tl.int64) * cols
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    share = (tiles + SPLIT - 1) // SPLIT
    first = tl.program_id(2) * share
    for step in range(first * STEPS, tl.minimum(first + share, tiles) * STEPS):
        tile = step // STEPS
        at = (step - tile * STEPS) * WIDTH
        for s in tl.static_range(SUBTILES):
            code = codes(planes, n64, tiles, tile, s, at, j, inside, LOW, HIGH)
            k = tile * TILE + s * SUBTILE + at
            w = weights(code, AFFINE, entries, n, inside, rows, k, j, GROUP, WIDTH, KIND, FIRST)
            columns = k + j
            part = tl.load(x + x_start[None, :] + columns[:, None], mask=there[None, :] & (columns < cols)[:, None], other=0.0)
            sums = tl.dot(w.to(part.dtype), part, sums)
    store_sums(sums, n, m, inside, there, rows, tokens, bias, residual, out, partial, SPLIT)


@triton.jit
def vector(
    x, planes, entries, bias, residual, out, partial, rows, cols, tiles, exponent,
    AFFINE: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    NARROWEST: tl.constexpr = HIGH if HIGH else LOW
    SUBTILE: tl.constexpr = TILE * NARROWEST // 8
    STEPS: tl.constexpr = SUBTILE // WIDTH
    Q: tl.constexpr = WIDTH // 4
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    q = tl.arange(0, Q)
    inside = n < rows
    n64 = n.to(tl.int64)
    float_bits = tl.load(exponent)
    sums = tl.zeros((ROWS, Q), tl.float32)
    share = (tiles + SPLIT - 1) // SPLIT
    first = tl.program_id(1) * share
    for step in range(first * STEPS, tl.minimum(first + share, tiles) * STEPS):
        tile = step // STEPS
        at = (step - tile * STEPS) * WIDTH
        for s in tl.static_range(8 // NARROWEST):
            low = words(planes[0], n64, tiles, tile, s, at, q, inside, LOW, NARROWEST)
            high = words(planes[1], n64, tiles, tile, s, at, q, inside, HIGH, NARROWEST) if HIGH else low
            k = tile * TILE + s * SUBTILE + at
            scale, offset = AFFINE(entries, n, inside, rows, k, 4 * q, GROUP, WIDTH)
            x0, x1, x2, x3 = fours(x, k, q, cols, Q)
            # one scale for the four columns of a word: it multiplies their sum
            four = level_in_place(low, high, float_bits, s, 0, KIND, FIRST, LOW, HIGH) * (x0 * place(s, 0, KIND, LOW))[None, :]
            four += level_in_place(low, high, float_bits, s, 1, KIND, FIRST, LOW, HIGH) * (x1 * place(s, 1, KIND, LOW))[None, :]
            four += level_in_place(low, high, float_bits, s, 2, KIND, FIRST, LOW, HIGH) * (x2 * place(s, 2, KIND, LOW))[None, :]
            four += level_in_place(low, high, float_bits, s, 3, KIND, FIRST, LOW, HIGH) * (x3 * place(s, 3, KIND, LOW))[None, :]
            sums += four * scale
            if offset is not None:
                sums += ((x0 + x1) + (x2 + x3))[None, :] * offset
    store_row_sums(tl.sum(sums, 1), n, inside, rows, bias, residual, out, partial, SPLIT)


@triton.jit
def store_sums(sums, n, m, inside, there, rows, tokens, bias, residual, out, partial, SPLIT: tl.constexpr):
    """The end of a product of several tokens: (rows, tokens) to their places, or to those of this split."""
    where = m.to(tl.int64)[None, :] * rows + n[:, None]
    kept = there[None, :] & inside[:, None]
    if SPLIT > 1:
        tl.store(partial + tl.program_id(2).to(tl.int64) * tokens * rows + where, sums, mask=kept)
    else:
        if bias is not None:
            sums += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        if residual is not None:
            sums += tl.load(residual + where, mask=kept, other=0.0).to(tl.float32)
        tl.store(out + where, sums.to(out.dtype.element_ty), mask=kept)


@triton.jit
def store_row_sums(total, n, inside, rows, bias, residual, out, partial, SPLIT: tl.constexpr):
    """The end of a product of one token."""
    if SPLIT > 1:
        tl.store(partial + tl.program_id(1).to(tl.int64) * rows + n, total, mask=inside)
    else:
        if bias is not None:
            total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
        if residual is not None:
            total += tl.load(residual + n, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + n, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_up(partial, bias, residual, out, tokens, rows, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the sums of all splits from first to last, then bias and residual like `matrix` and `vector`. Axis 1: one program per token."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < rows
    token = tl.program_id(1).to(tl.int64)
    where = token * rows + n
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(SPLIT):
        total += tl.load(partial + (token + split * tokens) * rows + n, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        total += tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + where, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def decoded(
    planes, entries, out, rows, cols, tiles,
    AFFINE: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The decoded weight (rows, cols) in out's type, for batches so large that a library's float product is faster. A tile per program."""
    SUBTILES: tl.constexpr = 8 // (HIGH if HIGH else LOW)
    SUBTILE: tl.constexpr = TILE // SUBTILES
    STEPS: tl.constexpr = SUBTILE // WIDTH
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, WIDTH)
    inside = n < rows
    tile = tl.program_id(1)
    n64 = n.to(tl.int64)
    for step in range(STEPS):
        at = step * WIDTH
        for s in tl.static_range(SUBTILES):
            code = codes(planes, n64, tiles, tile, s, at, j, inside, LOW, HIGH)
            k = tile * TILE + s * SUBTILE + at
            w = weights(code, AFFINE, entries, n, inside, rows, k, j, GROUP, WIDTH, KIND, FIRST)
            columns = k + j
            kept = inside[:, None] & (columns < cols)[None, :]
            tl.store(out + n.to(tl.int64)[:, None] * cols + columns[None, :], w.to(out.dtype.element_ty), mask=kept)
