"""Attention of one new token over a packed KV cache (int8, int4, float8), and the kernel that rounds tokens into it.

layout   a head's tokens one after the other, `width` codes each. 4 bits: byte j holds channel j in its low nibble and channel
         j + width / 2 in its high one, so that a tile of bytes is two tiles of codes, each multiplied by its half of the query. Keys of
         int8 and int4 have a float16 scale and minimum per channel and 32 tokens (groups, width), keys of float8 one scale per token.
         Values have theirs per token. Tokens that are not rounded yet (the sink, the newest group) stay in x's type
bytes    per token and head, keys and values of 128 channels: int8 276, int4 148, float8 260; 512 in float16
bound    memory: the query heads that share a head of the cache (GQA) read it once
tiles    16 queries (of one head of the cache) by 32 tokens by all channels, a group of keys at a time: tile_shapes.csv has warps and
         stages
split    SPLIT programs share a head's tokens, and the last takes the unrounded ones too; `combine` joins their results by their maxima
broken   integers have no code for NaN and infinity: an infinity is stored as float16's largest value and ruins the precision of its
         group. float8 keeps NaN
softmax  in base 2, running maximum and sum in float32; keys, values and weights of tokens are rounded to x's type for the tensor cores
"""

from __future__ import annotations

import triton
import triton.language as tl

from fewbits.kernels.triton.kernels.decode import e4m3, to_float
from fewbits.kernels.triton.kernels.float8 import to_e4m3

GROUP = tl.constexpr(32)  # tokens whose keys share scales
_NEVER = tl.constexpr(-1.0e38)  # a score below all others; finite, so that the difference of two is not NaN


@triton.jit
def _codes(codes, start, token, j, inside, width, BITS: tl.constexpr, HALF: tl.constexpr):
    """(tokens, len(j)) codes of channels j; with HALF, of the channels width / 2 further on."""
    per_row = width * BITS // 8
    octets = tl.load(codes + start * per_row + token[:, None] * per_row + j[None, :], mask=inside, other=0).to(tl.int32)
    return (octets >> (4 * HALF)) & 15 if BITS == 4 else octets


@triton.jit
def _keys(codes, scales, minima, start, group, token, j, inside, width, BITS: tl.constexpr, HALF: tl.constexpr, KIND: tl.constexpr):
    """Keys of 32 tokens. If scales are per channel, these tokens are group number `group`, counted over all heads."""
    code = _codes(codes, start, token, j, inside, width, BITS, HALF)
    if KIND == "e4m3":
        keys = e4m3(code) * tl.load(scales + start + token).to(tl.float32)[:, None]  # no mask: there is space for whole groups
    else:
        channel = group * width + HALF * (width // 2) + j
        within = j < width * BITS // 8
        scale, minimum = tl.load(scales + channel, mask=within, other=0.0), tl.load(minima + channel, mask=within, other=0.0)
        keys = to_float(code) * scale.to(tl.float32)[None, :] + minimum.to(tl.float32)[None, :]
    return keys


@triton.jit
def _values(codes, scales, minima, start, token, j, inside, width, BITS: tl.constexpr, HALF: tl.constexpr, KIND: tl.constexpr):
    code = _codes(codes, start, token, j, inside, width, BITS, HALF)
    scale = tl.load(scales + start + token).to(tl.float32)[:, None]
    if KIND == "e4m3":  # noqa: SIM108  (an `if` of constants compiles one branch only)
        values = e4m3(code) * scale
    else:
        values = to_float(code) * scale + tl.load(minima + start + token).to(tl.float32)[:, None]
    return values


@triton.jit
def attend(
    q, key_codes, key_scales, key_minima, value_codes, value_scales, value_minima, rest_keys, rest_values,
    out, peaks, sums, packed, rest, capacity, room, queries, width, share, factor,
    BITS: tl.constexpr, KIND: tl.constexpr, QUERIES: tl.constexpr, CHANNELS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """q (heads, queries, width). One program per head of the cache and split. out (heads, SPLIT, queries, width) float32 is not yet divided
    by `sums`."""
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALVES: tl.constexpr = 2 if BITS == 4 else 1
    row, t, j = tl.arange(0, QUERIES), tl.arange(0, GROUP), tl.arange(0, CHANNELS // HALVES)
    within = j < width // HALVES
    asked = (row < queries)[:, None] & within[None, :]
    q_at = q + (head * queries + row[:, None]) * width + j[None, :]
    first = tl.load(q_at, mask=asked, other=0.0)
    peak, total = tl.full((QUERIES,), _NEVER, tl.float32), tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, CHANNELS // HALVES), tl.float32)
    if HALVES == 2:
        second = tl.load(q_at + width // 2, mask=asked, other=0.0)
        mixed_second = tl.zeros((QUERIES, CHANNELS // HALVES), tl.float32)
    start, groups = head * capacity, head * (capacity // GROUP)
    for base in range(split * share, tl.minimum((split + 1) * share, packed), GROUP):
        token = base + t
        inside = (token < packed)[:, None] & within[None, :]
        keys = _keys(key_codes, key_scales, key_minima, start, groups + base // GROUP, token, j, inside, width, BITS, 0, KIND)
        score = tl.dot(first, tl.trans(tl.where(inside, keys, 0.0).to(first.dtype)))
        if HALVES == 2:
            keys = _keys(key_codes, key_scales, key_minima, start, groups + base // GROUP, token, j, inside, width, BITS, 1, KIND)
            score = tl.dot(second, tl.trans(tl.where(inside, keys, 0.0).to(first.dtype)), score)
        score = tl.where((token < packed)[None, :], score * factor, _NEVER)
        higher = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total, peak = total * shrink + tl.sum(weight, 1), higher
        values = _values(value_codes, value_scales, value_minima, start, token, j, inside, width, BITS, 0, KIND)
        mixed = tl.dot(weight.to(first.dtype), tl.where(inside, values, 0.0).to(first.dtype), mixed * shrink[:, None])
        if HALVES == 2:
            values = _values(value_codes, value_scales, value_minima, start, token, j, inside, width, BITS, 1, KIND)
            mixed_second = tl.dot(weight.to(first.dtype), tl.where(inside, values, 0.0).to(first.dtype), mixed_second * shrink[:, None])
    for base in range(0, tl.where(split == SPLIT - 1, rest, 0), GROUP):
        token = base + t
        inside = (token < rest)[:, None] & within[None, :]
        at = (head * room + token[:, None]) * width + j[None, :]
        score = tl.dot(first, tl.trans(tl.load(rest_keys + at, mask=inside, other=0.0)))
        if HALVES == 2:
            score = tl.dot(second, tl.trans(tl.load(rest_keys + at + width // 2, mask=inside, other=0.0)), score)
        score = tl.where((token < rest)[None, :], score * factor, _NEVER)
        higher = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total, peak = total * shrink + tl.sum(weight, 1), higher
        mixed = tl.dot(weight.to(first.dtype), tl.load(rest_values + at, mask=inside, other=0.0), mixed * shrink[:, None])
        if HALVES == 2:
            later = tl.load(rest_values + at + width // 2, mask=inside, other=0.0)
            mixed_second = tl.dot(weight.to(first.dtype), later, mixed_second * shrink[:, None])
    place = (head * SPLIT + split) * queries + row
    tl.store(peaks + place, peak, mask=row < queries)
    tl.store(sums + place, total, mask=row < queries)
    tl.store(out + place[:, None] * width + j[None, :], mixed, mask=asked)
    if HALVES == 2:
        tl.store(out + place[:, None] * width + width // 2 + j[None, :], mixed_second, mask=asked)


@triton.jit
def combine(partial, peaks, sums, out, queries, width, SPLIT: tl.constexpr, CHANNELS: tl.constexpr):
    """One program per head and query."""
    head, query = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, j = tl.arange(0, SPLIT), tl.arange(0, CHANNELS)
    place = (head * SPLIT + s) * queries + query
    peak = tl.load(peaks + place)
    weight = tl.exp2(peak - tl.max(peak, 0))
    total = tl.sum(weight * tl.load(sums + place), 0)
    parts = tl.load(partial + place[:, None] * width + j[None, :], mask=(j < width)[None, :] & (s >= 0)[:, None], other=0.0)
    mixed = tl.div_rn(tl.sum(parts * weight[:, None], 0), total + tl.zeros((CHANNELS,), tl.float32))
    tl.store(out + (head * queries + query) * width + j, mixed.to(out.dtype.element_ty), mask=j < width)


@triton.jit
def settle(
    keys, values, key_codes, key_scales, key_minima, value_codes, value_scales, value_minima, first, tokens, room, packed, capacity, width,
    BITS: tl.constexpr, KIND: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Rounds tokens `first` to `first` + `tokens` of keys and values (heads, room, width) into the cache, after the `packed` tokens there.

    One program per head and 32 tokens. If keys have scales per channel, the tokens must be whole groups."""
    head, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALVES: tl.constexpr = 2 if BITS == 4 else 1
    t, j = group * GROUP + tl.arange(0, GROUP), tl.arange(0, CHANNELS // HALVES)
    there = t < tokens
    inside = there[:, None] & (j < width // HALVES)[None, :]
    source = (head * room + first + t[:, None]) * width + j[None, :]
    token = head * capacity + packed + t
    target = token[:, None] * (width * BITS // 8) + j[None, :]
    low_keys = tl.load(keys + source, mask=inside, other=0.0).to(tl.float32)
    low_values = tl.load(values + source, mask=inside, other=0.0).to(tl.float32)
    if KIND == "e4m3":
        key_scale, value_scale = _half(tl.div_rn(_largest(low_keys), 448.0)), _half(tl.div_rn(_largest(low_values), 448.0))
        tl.store(key_scales + token, key_scale.to(tl.float16), mask=there)
        tl.store(value_scales + token, value_scale.to(tl.float16), mask=there)
        tl.store(key_codes + target, to_e4m3(_divided(low_keys, key_scale[:, None])), mask=inside)
        tl.store(value_codes + target, to_e4m3(_divided(low_values, value_scale[:, None])), mask=inside)
    else:
        TOP: tl.constexpr = (1 << BITS) - 1
        channel = (head * (capacity // GROUP) + packed // GROUP + group) * width + j
        scale, minimum = _range(tl.min(low_keys, 0), tl.max(low_keys, 0), TOP)
        tl.store(key_scales + channel, scale.to(tl.float16), mask=j < width // HALVES)
        tl.store(key_minima + channel, minimum.to(tl.float16), mask=j < width // HALVES)
        key_code = _code(low_keys, scale[None, :], minimum[None, :], TOP)
        least = tl.min(tl.where(inside, low_values, float("inf")), 1)
        most = tl.max(tl.where(inside, low_values, float("-inf")), 1)
        if HALVES == 2:
            high_keys = tl.load(keys + source + width // 2, mask=inside, other=0.0).to(tl.float32)
            high_values = tl.load(values + source + width // 2, mask=inside, other=0.0).to(tl.float32)
            scale, minimum = _range(tl.min(high_keys, 0), tl.max(high_keys, 0), TOP)
            tl.store(key_scales + channel + width // 2, scale.to(tl.float16), mask=j < width // HALVES)
            tl.store(key_minima + channel + width // 2, minimum.to(tl.float16), mask=j < width // HALVES)
            key_code = key_code | (_code(high_keys, scale[None, :], minimum[None, :], TOP) << 4)
            least = tl.minimum(least, tl.min(tl.where(inside, high_values, float("inf")), 1))
            most = tl.maximum(most, tl.max(tl.where(inside, high_values, float("-inf")), 1))
        tl.store(key_codes + target, key_code.to(tl.uint8), mask=inside)
        scale, minimum = _range(tl.where(there, least, 0.0), tl.where(there, most, 0.0), TOP)
        tl.store(value_scales + token, scale.to(tl.float16), mask=there)
        tl.store(value_minima + token, minimum.to(tl.float16), mask=there)
        value_code = _code(low_values, scale[:, None], minimum[:, None], TOP)
        if HALVES == 2:
            value_code = value_code | (_code(high_values, scale[:, None], minimum[:, None], TOP) << 4)
        tl.store(value_codes + target, value_code.to(tl.uint8), mask=inside)


@triton.jit
def _largest(x):
    return tl.max(tl.abs(x), 1)


@triton.jit
def _half(x):
    """Scales and minima are rounded to float16, as they are stored, before codes are computed with them."""
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16).to(tl.float32)


@triton.jit
def _range(low, high, TOP: tl.constexpr):
    return _half(tl.div_rn(high - low, TOP * 1.0)), _half(low)


@triton.jit
def _divided(x, scale):
    """x / scale; 0 where the scale is 0."""
    whole = scale + tl.zeros_like(x)
    return tl.where(whole == 0, 0.0, tl.div_rn(x, tl.where(whole == 0, 1.0, whole)))


@triton.jit
def _code(x, scale, minimum, TOP: tl.constexpr):
    quotient = tl.minimum(tl.maximum(_divided(x - minimum, scale), 0.0), TOP * 1.0)
    return ((quotient + 8388608.0).to(tl.int32, bitcast=True)) & 0xFF  # rounds half to even: 2^23 leaves no bit for a fraction
