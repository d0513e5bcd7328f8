"""The pieces of decoding that all families share: codes from planes, levels from codes, scales for each row. All inlined into the products.

Bit operations replace conversions where that is exact: `code | 0x4B000000` read as a float is 2^23 + code, so an OR and a subtraction turn
a code into a float, at twice the rate of a conversion.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = tl.constexpr(256)  # as in layout.py


@triton.jit
def codes(planes, n, tiles, tile, s: tl.constexpr, at, j, inside, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Codes of columns `at` + j of sub-tile s of a tile, for every row n (int64): (rows, len(j)) int32.

    Several sub-tiles share the bytes of a piece. Each asks for them again; the compiler loads them once.
    """
    code = _field(planes[0], n, tiles, tile, s, at, j, inside, LOW, HIGH if HIGH else LOW)
    if HIGH:
        code = code | (_field(planes[1], n, tiles, tile, s, at, j, inside, HIGH, HIGH) << LOW)
    return code


@triton.jit
def _field(plane, n, tiles, tile, s: tl.constexpr, at, j, inside, BITS: tl.constexpr, NARROWEST: tl.constexpr):
    TILE_BYTES: tl.constexpr = TILE * BITS // 8
    PIECE: tl.constexpr = TILE * NARROWEST // 8  # bytes, and columns of a sub-tile
    FIELDS: tl.constexpr = 8 // BITS
    where = n[:, None] * (tiles * TILE_BYTES) + (tile * TILE_BYTES + (s // FIELDS) * PIECE + at) + j[None, :]
    octets = tl.load(plane + where, mask=inside[:, None], other=0).to(tl.int32)
    return (octets >> (BITS * (s % FIELDS))) & ((1 << BITS) - 1)


@triton.jit
def words(plane, n, tiles, tile, s: tl.constexpr, at, q, inside, BITS: tl.constexpr, NARROWEST: tl.constexpr):
    """The same bytes four at a time: (rows, len(q)) int32; byte b of word q is that of column `at` + 4q + b. The plane is int32."""
    TILE_WORDS: tl.constexpr = TILE * BITS // 32
    PIECE: tl.constexpr = TILE * NARROWEST // 32
    where = n[:, None] * (tiles * TILE_WORDS) + (tile * TILE_WORDS + (s // (8 // BITS)) * PIECE + at // 4) + q[None, :]
    return tl.load(plane + where, mask=inside[:, None], other=0)


@triton.jit
def level_in_place(
    low, high, exponent, s: tl.constexpr, B: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr
):
    """The level of byte B of each word, times 2^(`place` of the same s and B).

    An integer stays at its place in the word: the bits around it are masked off, and the rest read as a float is 2^23 + code * 2^place.
    That is one instruction instead of a shift, a mask and an OR, provided that the compiler does not know `exponent` (0x4B000000) as a
    constant: the instruction has room for only one. Levels of other kinds are looked up, and their place is 0.
    """
    if KIND == "signs":
        return signs(low << (31 - 8 * B - LOW * s))
    if KIND == "e2m1":
        return e2m1(low >> (8 * B + LOW * s))
    if KIND == "e4m3":
        return e4m3(low >> (8 * B))
    P: tl.constexpr = 8 * (B % 2) + LOW * (s % (8 // LOW))
    above = exponent if KIND == "integers" else 0
    if HIGH:
        AT: tl.constexpr = 8 * (B % 2) + HIGH * s - P - LOW  # shift of the upper bits to their place
        upper = high >> (16 * (B // 2))
        above = ((upper >> AT if AT >= 0 else upper << -AT) & (((1 << HIGH) - 1) << (P + LOW))) | above
    bits = ((low >> (16 * (B // 2))) & (((1 << LOW) - 1) << P)) | above
    if KIND == "integers":
        return bits.to(tl.float32, bitcast=True) - (8388608.0 - FIRST * (1 << P))
    return level(bits >> P, KIND, FIRST)


@triton.jit
def fours(x, k, q, cols, Q: tl.constexpr):
    """x at k + 4q, k + 4q + 1, + 2 and + 3, each (len(q),) float32: loaded side by side."""
    at = k + 4 * q[:, None] + tl.arange(0, 4)[None, :]
    even, odd = tl.split(tl.reshape(tl.load(x + at, mask=at < cols, other=0.0).to(tl.float32), (Q, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def entry(array, n, inside, rows, k, j, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """The entry (a scale, say) for columns k + j of every row: (rows, 1), or (rows, WIDTH) where WIDTH columns have several entries.

    One load per row and group, contiguous over the lanes. With a load per column the compiler kept all of them: 255 registers, and spills.
    """
    if GROUP == 0:
        value = tl.load(array + n, mask=inside, other=0)[:, None]
    else:
        value = tl.load(array + (k // GROUP) * rows + n, mask=inside, other=0)[:, None]
        for i in tl.static_range(1, (WIDTH + GROUP - 1) // GROUP):
            later = tl.load(array + (k // GROUP + i) * rows + n, mask=inside, other=0)[:, None]
            value = tl.where(j[None, :] >= i * GROUP, later, value)
    return value


@triton.jit
def level(code, KIND: tl.constexpr, FIRST: tl.constexpr):
    """int32 codes -> float32 levels."""
    if KIND == "integers":
        return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 - FIRST)
    if KIND == "non-linear":
        return to_float(_non_linear(code)) + FIRST
    if KIND == "signs":
        return signs(code << 31)
    if KIND == "e2m1":
        return e2m1(code)
    if KIND == "e5m2":
        return e5m2(code)
    return e4m3(code)


@triton.jit
def to_float(code):
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _non_linear(code):
    """iq4_nl's sixteen levels, + 127, as bytes of four words: two bits choose the word, two the byte."""
    low = tl.where(code & 4 != 0, 0x75695C4E, 0x3E2C1700)
    high = tl.where(code & 4 != 0, 0xF0D8C4B4 - 0x100000000, 0xA5988C80 - 0x100000000)
    return (tl.where(code & 8 != 0, high, low) >> ((code & 3) * 8)) & 255


@triton.jit
def signs(code):
    """1 where the uppermost bit is set, else -1: the bits of -1, with the sign turned."""
    return ((code & -0x80000000) ^ -0x40800000).to(tl.float32, bitcast=True)


@triton.jit
def e2m1(code):
    """A shift up and an arithmetic shift down move sign, exponent and mantissa to float32's places; the result is 2^126 too small. 0.5 is
    then subnormal, so the kernels must be compiled without flushing subnormals to zero."""
    return (((code << 28) >> 6) & -0x7E400000).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e5m2(code):
    """e5m2 is the upper byte of a float16."""
    return (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e4m3(code):
    """As `e2m1`, of the lowest eight bits; the shifted number is 2^120 too small. There is no infinity, and 0x7F is NaN."""
    bits = ((code << 24) >> 4) & -0x78100000
    return tl.where((bits & 0x07F00000) == 0x07F00000, float("nan"), bits.to(tl.float32, bitcast=True) * 1.329227995784916e36)


@triton.jit
def e8m0(code):
    """2^(code - 127), made of its exponent bits; 2^-127 is subnormal, and 255 is NaN."""
    value = (code << 23).to(tl.float32, bitcast=True)
    smallest = tl.full(code.shape, 0x00400000, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(code == 255, float("nan"), tl.where(code == 0, smallest, value))
