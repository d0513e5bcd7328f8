"""The products of products.py, and the decoded weight, for codes that stand for vectors (points.py).

one token    `vector_of_points`: a lane has four rows of the same 32 columns and takes their four vectors one after the other, so that x is
             converted once for four weights; of eight rows it would be 4 % fewer instructions, and half as many lanes at work
several      `matrix_of_points`: 32 columns of ROWS rows at a time are decoded, rounded to x's type, and go into the tensor cores
decoded      `decoded_points`: the weight itself

FETCH is a function of codebooks.py; a row has whole super-blocks, so that no column needs a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fewbits.kernels.triton.kernels.decode import TILE
from fewbits.kernels.triton.kernels.points import add_four, eight, eights, side_by_side
from fewbits.kernels.triton.kernels.products import store_row_sums, store_sums

GROUPS = tl.constexpr(8)  # of 32 columns, in a tile


@triton.jit
def vector_of_points(
    x, table, entries, bias, residual, out, partial, rows, tiles, exponent,
    FETCH: tl.constexpr, HIGH: tl.constexpr, SIGNS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    g = tl.arange(0, GROUPS)
    inside = n < rows
    float_bits = tl.load(exponent)  # see `decode.level_in_place`
    sums = tl.zeros((ROWS, GROUPS), tl.float32)
    share = (tiles + SPLIT - 1) // SPLIT
    first_tile = tl.program_id(1) * share
    for tile in range(first_tile, tl.minimum(first_tile + share, tiles)):
        group, scale, later, offset = FETCH(entries, n[:, None], inside[:, None], rows, tile, g[None, :])
        made = tl.zeros((ROWS, GROUPS), tl.float32)
        for i in tl.static_range(4):
            x0, x1, x2, x3, x4, x5, x6, x7 = eights(x, 32 * g + (tile * TILE + 8 * i))
            first, last = eight(table, group, i, HIGH, SIGNS)
            made = add_four(made, first, float_bits, x0, x1, x2, x3)
            made = add_four(made, last, float_bits, x4, x5, x6, x7)
            if i == 1 and later is not None:
                sums += made * scale
                made = tl.zeros((ROWS, GROUPS), tl.float32)
            if offset is not None:
                sums += (((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7)))[None, :] * offset
        sums += made * (scale if later is None else later)
    store_row_sums(tl.sum(sums, 1), n, inside, rows, bias, residual, out, partial, SPLIT)


@triton.jit
def matrix_of_points(
    x, table, entries, bias, residual, out, partial, tokens, rows, cols, tiles,
    FETCH: tl.constexpr, HIGH: tl.constexpr, SIGNS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    j = tl.arange(0, 32)
    inside, there = n < rows, m < tokens
    x_start = m.to(tl.int64) * cols
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    share = (tiles + SPLIT - 1) // SPLIT
    first_tile = tl.program_id(2) * share
    for step in range(first_tile * GROUPS, tl.minimum(first_tile + share, tiles) * GROUPS):
        w = _weights(table, entries, n, inside, rows, step, FETCH, HIGH, SIGNS, ROWS, x.dtype.element_ty)
        part = tl.load(x + x_start[None, :] + (j + 32 * step)[:, None], mask=there[None, :], other=0.0)
        sums = tl.dot(w, part, sums)
    store_sums(sums, n, m, inside, there, rows, tokens, bias, residual, out, partial, SPLIT)


@triton.jit
def decoded_points(
    table, entries, out, rows, cols, FETCH: tl.constexpr, HIGH: tl.constexpr, SIGNS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """(rows, cols) in out's type. A tile per program."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, 32)
    inside = n < rows
    for step in range(tl.program_id(1) * GROUPS, tl.program_id(1) * GROUPS + GROUPS):
        w = _weights(table, entries, n, inside, rows, step, FETCH, HIGH, SIGNS, ROWS, out.dtype.element_ty)
        tl.store(out + n.to(tl.int64)[:, None] * cols + (j + 32 * step)[None, :], w, mask=inside[:, None])


@triton.jit
def _weights(
    table, entries, n, inside, rows, step, FETCH: tl.constexpr, HIGH: tl.constexpr, SIGNS: tl.constexpr, ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """(ROWS, 32): columns 32 * step and on."""
    i = tl.arange(0, 4)[None, :]
    group, scale, later, offset = FETCH(entries, n[:, None], inside[:, None], rows, step // GROUPS, step & 7)
    if later is not None:
        scale = tl.where(i >= 2, later, scale)
    first, last = eight(table, group, i, HIGH, SIGNS)
    return side_by_side(first, last, scale, offset, ROWS, DTYPE)
