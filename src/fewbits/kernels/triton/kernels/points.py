"""Codes that stand for vectors: eight weights from the index of a point, signs, and a table of points. All inlined into the products.

A point is looked up as bytes, each a whole number + 128, four to a word. Signs turn four bytes at once, and from there on the weights are
integers of 8 bits, which become floats as those of any other format do (decode.py). A table has 1 to 16 KB and stays in the first-level
cache: eight weights are one look-up of 8 bytes, or two of 4.

What a format stores for 32 columns, four vectors of eight, is fetched into a few numbers (codebooks.py), which say for vector i:

    low, second   byte i is the lower part of an index; `second` is there where a point has four weights, and has that of the other four
    high          the HIGH bits at HIGH * i are the rest of the index; where a point has four weights, one bit of each of the two. With
                  SIGNS = "shifted", the uppermost of the HIGH bits is the shift: 1 is down
    signs         "even": seven bits at 7i, and the number of negative weights is even. "free": eight bits at 8i
"""

from __future__ import annotations

import triton
import triton.language as tl

from fewbits.kernels.triton.kernels.decode import level_in_place

EACH = tl.constexpr(0x01010101)


@triton.jit
def eight(table, group, i, HIGH: tl.constexpr, SIGNS: tl.constexpr):
    """Vector i of the group: two words of four bytes, weight + 128. i is a number, or counts along the columns of a matrix."""
    low, second, high, signs = group
    index = (low >> (8 * i)) & 255
    if second is None:
        if HIGH:
            INDEX: tl.constexpr = 7 if SIGNS == "shifted" else (1 << HIGH) - 1
            index = index | (((high >> (HIGH * i)) & INDEX) << 8)
        point = tl.load(table + index)  # int64
        first, last = point.to(tl.int32), (point >> 32).to(tl.int32)
    else:
        other = (second >> (8 * i)) & 255
        if HIGH:
            index = index | (((high >> (HIGH * i)) & 1) << 8)
            other = other | (((high >> (HIGH * i + 1)) & 1) << 8)
        first, last = tl.load(table + index), tl.load(table + other)
    if SIGNS == "even":
        eighth = _parity(signs) >> (7 * i)
        first = _turned(first, (signs >> (7 * i)) & 127)
        last = _turned(last, ((signs >> (7 * i + 4)) & 7) | ((eighth & 1) << 3))
    elif SIGNS == "free":
        first = _turned(first, (signs >> (8 * i)) & 127)
        last = _turned(last, (signs >> (8 * i + 4)) & 15)
    elif SIGNS == "shifted":
        shift = EACH - 2 * EACH * ((high >> (HIGH * i + 3)) & 1)
        first += shift
        last += shift
    return first, last


@triton.jit
def _turned(word, signs):
    """Bytes 128 + m become 128 - m where the byte's sign is 1. m is at least 1, so nothing is carried into the next byte. Signs are the
    lowest four of seven bits at most."""
    ones = (signs * 0x00204081) & EACH  # bit b goes to byte b
    return (word ^ ((ones << 8) - ones)) + ones


@triton.jit
def _parity(signs):
    """At bit 7i: whether an odd number of the seven bits at 7i is set."""
    two = signs ^ (signs >> 1)
    return two ^ (two >> 2) ^ (two >> 4) ^ (signs >> 6)


@triton.jit
def eights(x, k):
    """x at k .. k + 7, each (len(k),) float32. A lane loads what it needs: loaded side by side, x would go through shared memory."""
    x += k
    x0, x1 = tl.load(x).to(tl.float32), tl.load(x + 1).to(tl.float32)
    x2, x3 = tl.load(x + 2).to(tl.float32), tl.load(x + 3).to(tl.float32)
    x4, x5 = tl.load(x + 4).to(tl.float32), tl.load(x + 5).to(tl.float32)
    x6, x7 = tl.load(x + 6).to(tl.float32), tl.load(x + 7).to(tl.float32)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def add_four(sums, word, exponent, x0, x1, x2, x3):
    """The word's four weights times x, added to sums. Two of the bytes are 2^8 too large: see `decode.level_in_place`."""
    sums += level_in_place(word, word, exponent, 0, 0, "integers", -128.0, 8, 0) * x0[None, :]
    sums += level_in_place(word, word, exponent, 0, 1, "integers", -128.0, 8, 0) * (x1 * (1.0 / 256))[None, :]
    sums += level_in_place(word, word, exponent, 0, 2, "integers", -128.0, 8, 0) * x2[None, :]
    sums += level_in_place(word, word, exponent, 0, 3, "integers", -128.0, 8, 0) * (x3 * (1.0 / 256))[None, :]
    return sums


@triton.jit
def side_by_side(first, last, scale, offset, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    """The weights of words (ROWS, 4), eight columns each: (ROWS, 32), rounded once to DTYPE."""
    w04 = tl.join(_weight(first, 0, scale, offset, DTYPE), _weight(last, 0, scale, offset, DTYPE))
    w15 = tl.join(_weight(first, 1, scale, offset, DTYPE), _weight(last, 1, scale, offset, DTYPE))
    w26 = tl.join(_weight(first, 2, scale, offset, DTYPE), _weight(last, 2, scale, offset, DTYPE))
    w37 = tl.join(_weight(first, 3, scale, offset, DTYPE), _weight(last, 3, scale, offset, DTYPE))
    return tl.reshape(tl.join(tl.join(w04, w26), tl.join(w15, w37)), (ROWS, 32))


@triton.jit
def _weight(word, B: tl.constexpr, scale, offset, DTYPE: tl.constexpr):
    code = (word >> (8 * B)) & 255
    w = ((code | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0) * scale
    if offset is not None:
        w += offset
    return w.to(DTYPE)
