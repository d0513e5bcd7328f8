// tiles.h with VNNI: a lane is a row, and vpdpbusd adds the products of the four columns of a step.
#include "matmul/tiles.h"
#include "platform/avx512.h"

#if defined(__x86_64__)
namespace fewbits {
namespace {

FEWBITS_AVX512_INLINE __m512i load_64(const uint8_t* at) { return _mm512_loadu_si512(at); }

// Bits `from` and up of each byte, `kCount` of them, moved to bit `kTo`.
template <int kFrom, int kCount, int kTo>
FEWBITS_AVX512_INLINE __m512i bits_at(__m512i bytes_u8x64) {
  const __m512i moved_u8x64 =
      kFrom >= kTo ? _mm512_srli_epi16(bytes_u8x64, kFrom - kTo) : _mm512_slli_epi16(bytes_u8x64, kTo - kFrom);
  return _mm512_and_si512(moved_u8x64, _mm512_set1_epi8(static_cast<char>(((1 << kCount) - 1) << kTo)));
}

// Step kStep of a plane of kBits bits, at bit kTo.
template <int kStep, int kBits, int kTo>
FEWBITS_AVX512_INLINE __m512i step_of_plane(const uint8_t* plane) {
  return bits_at<kStep / kBits * kBits, kBits, kTo>(load_64(plane + 64 * (kStep % kBits)));
}

template <int kStep, int kBits, bool kLevels>
FEWBITS_AVX512_INLINE __m512i step_of(const uint8_t* codes, __m512i levels_u8x64) {
  constexpr int kFirst = kBits >= 4 ? 4 : 2;
  if constexpr (kBits == 8)
    return load_64(codes + 64 * kStep);
  else if constexpr (kBits == 1)  // bytes of 0 and 2
    return step_of_plane<kStep, 1, 1>(codes);
  else if constexpr (kLevels)
    return _mm512_shuffle_epi8(levels_u8x64, step_of_plane<kStep, kFirst, 0>(codes));
  else if constexpr (kBits == kFirst)
    return step_of_plane<kStep, kFirst, 0>(codes);
  else
    return _mm512_or_si512(step_of_plane<kStep, kFirst, 0>(codes),
                           step_of_plane<kStep, kBits - kFirst, kFirst>(codes + 64 * kFirst));
}

FEWBITS_AVX512_INLINE __m512i level_lanes(const ByteTraits& bytes) {
  return bytes.levels ? _mm512_broadcast_i32x4(load_16(bytes.levels)) : _mm512_setzero_si512();
}

// One step of all streams, each to its own sum.
template <int kStep, int kBits, bool kLevels>
FEWBITS_AVX512_INLINE void add_step(const uint8_t* const (&codes)[kStreams], __m512i levels_u8x64, const int8_t* x,
                                    __m512i (&sums)[kStreams]) {
  int32_t four;
  std::memcpy(&four, x + 4 * kStep, 4);
  const __m512i x_i8x64 = _mm512_set1_epi32(four);
#pragma GCC unroll 4
  for (size_t s = 0; s < kStreams; ++s) {
    if (kStep < kBits) _mm_prefetch(reinterpret_cast<const char*>(codes[s]) + kAhead + 64 * kStep, _MM_HINT_T0);
    sums[s] = _mm512_dpbusd_epi32(sums[s], step_of<kStep, kBits, kLevels>(codes[s], levels_u8x64), x_i8x64);
  }
}

FEWBITS_AVX512_INLINE __m512 halves_at(const uint8_t* at) { return _mm512_cvtph_ps(load_32(at)); }

// kInPlace: scales and offsets are float16, and converting one costs no more than loading it.
template <int kBits, bool kLevels, bool kBy16, bool kOffsets, bool kInPlace>
FEWBITS_AVX512 void dot(const Tiling& tiling, StripeSums (&stripes)[kStreams], size_t blocks, const ActivationRow& x,
                        size_t first) {
  constexpr int kUnits = kBy16 ? 2 : 1;
  const __m512i levels_u8x64 = level_lanes(tiling.bytes);
  const int shift = std::countr_zero(tiling.unit_of_run());
  const size_t offsets = 2 * kStripe * tiling.runs(blocks);  // they follow the scales
  const uint8_t* codes[kStreams];
  __m512 total_f32x16[kStreams];
#pragma GCC unroll 4
  for (size_t s = 0; s < kStreams; ++s) {
    codes[s] = stripes[s].codes;
    total_f32x16[s] = _mm512_load_ps(stripes[s].total);
  }
  for (size_t b = 0; b < blocks; ++b) {
    const __m512 x_scale_f32x16 = _mm512_set1_ps(x.scale[first + b]);
    const int8_t* const q = x.q + 32 * (first + b);
#pragma GCC unroll 2
    for (int unit = 0; unit < kUnits; ++unit) {
      __m512i sums_i32x16[kStreams];
      const __m512i zeros_i32x16 = _mm512_set1_epi32(kBy16 ? x.zeros_16[2 * (first + b) + unit] : x.zeros[first + b]);
#pragma GCC unroll 4
      for (size_t s = 0; s < kStreams; ++s) sums_i32x16[s] = zeros_i32x16;
      if (!kBy16 || unit == 0) {
        add_step<0, kBits, kLevels>(codes, levels_u8x64, q, sums_i32x16);
        add_step<1, kBits, kLevels>(codes, levels_u8x64, q, sums_i32x16);
        add_step<2, kBits, kLevels>(codes, levels_u8x64, q, sums_i32x16);
        add_step<3, kBits, kLevels>(codes, levels_u8x64, q, sums_i32x16);
      }
      if (!kBy16 || unit == 1) {
        add_step<4, kBits, kLevels>(codes, levels_u8x64, q, sums_i32x16);
        add_step<5, kBits, kLevels>(codes, levels_u8x64, q, sums_i32x16);
        add_step<6, kBits, kLevels>(codes, levels_u8x64, q, sums_i32x16);
        add_step<7, kBits, kLevels>(codes, levels_u8x64, q, sums_i32x16);
      }
      const size_t at = kUnits * b + unit;
#pragma GCC unroll 4
      for (size_t s = 0; s < kStreams; ++s) {
        const uint8_t* const halves = stripes[s].header + 2 * kStripe * (at >> shift);
        const __m512 own_f32x16 = kInPlace ? halves_at(halves) : _mm512_load_ps(stripes[s].scale[at]);
        const __m512 scale_f32x16 = _mm512_mul_ps(own_f32x16, x_scale_f32x16);
        total_f32x16[s] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums_i32x16[s]), scale_f32x16, total_f32x16[s]);
        if constexpr (kOffsets) {
          const __m512 sum_f32x16 = _mm512_set1_ps((kBy16 ? x.sum_16 : x.sum_32)[kUnits * first + at]);
          const __m512 offset_f32x16 = kInPlace ? halves_at(halves + offsets) : _mm512_load_ps(stripes[s].offset[at]);
          total_f32x16[s] = _mm512_fmadd_ps(offset_f32x16, sum_f32x16, total_f32x16[s]);
        }
      }
    }
#pragma GCC unroll 4
    for (size_t s = 0; s < kStreams; ++s) codes[s] += 64 * kBits;
  }
  for (size_t s = 0; s < kStreams; ++s) _mm512_store_ps(stripes[s].total, total_f32x16[s]);
}

template <int kBits, bool kLevels>
FEWBITS_AVX512 void unpack(const Tiling& tiling, const uint8_t* codes, size_t blocks, size_t lane,
                           uint8_t (*into)[kPanelRows][4]) {
  const __m512i levels_u8x64 = level_lanes(tiling.bytes);
  for (size_t b = 0; b < blocks; ++b, codes += 64 * kBits, into += 8) {
    for (int line = 0; line < kBits; ++line) _mm_prefetch(reinterpret_cast<const char*>(codes) + kAhead + 64 * line, _MM_HINT_T0);
    _mm512_store_si512(into[0][lane], step_of<0, kBits, kLevels>(codes, levels_u8x64));
    _mm512_store_si512(into[1][lane], step_of<1, kBits, kLevels>(codes, levels_u8x64));
    _mm512_store_si512(into[2][lane], step_of<2, kBits, kLevels>(codes, levels_u8x64));
    _mm512_store_si512(into[3][lane], step_of<3, kBits, kLevels>(codes, levels_u8x64));
    _mm512_store_si512(into[4][lane], step_of<4, kBits, kLevels>(codes, levels_u8x64));
    _mm512_store_si512(into[5][lane], step_of<5, kBits, kLevels>(codes, levels_u8x64));
    _mm512_store_si512(into[6][lane], step_of<6, kBits, kLevels>(codes, levels_u8x64));
    _mm512_store_si512(into[7][lane], step_of<7, kBits, kLevels>(codes, levels_u8x64));
  }
}

// out[unit] = factor * (integer - zero), from the planes that tiles.cc writes.
FEWBITS_AVX512_INLINE void expand_six(const uint8_t* at, size_t units, int zero, __m512 factor_f32x16, float* out,
                                      size_t stride) {
  const __m128i nibble_u8x16 = _mm_set1_epi8(15), top_u8x16 = _mm_set1_epi8(48);
  const __m512i zero_i32x16 = _mm512_set1_epi32(zero);
  for (size_t first = 0; first < units; first += 8, at += 96) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const __m128i low_u8x16 = _mm_and_si128(_mm_srli_epi16(load_16(at + 16 * (i % 4)), i / 4 * 4), nibble_u8x16);
      const __m128i both_u8x16 = load_16(at + 64 + 16 * (i % 2));
      const int from = i / 2 * 2;
      const __m128i moved_u8x16 = from >= 4 ? _mm_srli_epi16(both_u8x16, from - 4) : _mm_slli_epi16(both_u8x16, 4 - from);
      const __m128i six_u8x16 = _mm_or_si128(low_u8x16, _mm_and_si128(moved_u8x16, top_u8x16));
      const __m512i value_i32x16 = _mm512_sub_epi32(_mm512_cvtepu8_epi32(six_u8x16), zero_i32x16);
      _mm512_storeu_ps(out + (first + i) * stride, _mm512_mul_ps(_mm512_cvtepi32_ps(value_i32x16), factor_f32x16));
    }
  }
}

FEWBITS_AVX512 void expand_nested(const Tiling& tiling, const uint8_t* chunk, size_t blocks, float* scale, float* offset,
                                  size_t stride) {
  const ByteTraits& bytes = tiling.bytes;
  const size_t units = tiling.units(blocks);
  const __m512 d_f32x16 = halves_at(chunk);
  const uint8_t* at = chunk + 2 * kStripe;
  __m512 minus_dmin_f32x16 = _mm512_setzero_ps();
  if (bytes.offsets) {
    minus_dmin_f32x16 = _mm512_sub_ps(_mm512_set1_ps(-0.0f), halves_at(at));
    at += 2 * kStripe;
  }
  if (bytes.scales == Scales::kSixBits) {
    expand_six(at, units, bytes.sub_zero, d_f32x16, scale, stride);
    if (bytes.offsets) expand_six(at + tiling.integer_bytes(blocks), units, 0, minus_dmin_f32x16, offset, stride);
  } else if (bytes.scales == Scales::kEightBits) {
    for (size_t i = 0; i < units; ++i)
      _mm512_storeu_ps(scale + i * stride,
                       _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(at + kStripe * i))), d_f32x16));
  } else {
    for (size_t i = 0; i < units; ++i) {
      const __m512i both_i32x16 = _mm512_cvtepu8_epi32(load_16(at + kStripe * i));
      const __m512i low_i32x16 = _mm512_and_si512(both_i32x16, _mm512_set1_epi32(15));
      _mm512_storeu_ps(scale + i * stride, _mm512_mul_ps(_mm512_cvtepi32_ps(low_i32x16), d_f32x16));
      _mm512_storeu_ps(offset + i * stride,
                       _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(both_i32x16, 4)), minus_dmin_f32x16));
    }
  }
}

// 2^(e - 128), by bits: the two smallest are subnormal, and 255 is NaN.
FEWBITS_AVX512_INLINE __m512 power_of(__m128i exponents_u8x16) {
  const __m512i e_i32x16 = _mm512_cvtepu8_epi32(exponents_u8x16);
  const __m512i normal_i32x16 = _mm512_slli_epi32(_mm512_sub_epi32(e_i32x16, _mm512_set1_epi32(1)), 23);
  const __m512i small_i32x16 = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e_i32x16);
  const __mmask16 is_small = _mm512_cmplt_epi32_mask(e_i32x16, _mm512_set1_epi32(2));
  const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(e_i32x16, _mm512_set1_epi32(255));
  const __m512i value_i32x16 = _mm512_mask_mov_epi32(normal_i32x16, is_small, small_i32x16);
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(value_i32x16, is_nan, _mm512_set1_epi32(0x7fc00000)));
}

FEWBITS_AVX512 void expand_plain(const Tiling& tiling, const uint8_t* chunk, size_t blocks, float* scale, float* offset,
                                 size_t stride) {
  const ByteTraits& bytes = tiling.bytes;
  const bool exponents = bytes.scales == Scales::kExponent;
  const size_t runs = tiling.runs(blocks), units = tiling.units(blocks), each = tiling.unit_of_run();
  const uint8_t* const offsets = chunk + runs * kStripe * (exponents ? 1 : 2);
  for (size_t i = 0; i < runs; ++i) {
    const __m512 scale_f32x16 = exponents ? power_of(load_16(chunk + kStripe * i)) : halves_at(chunk + 2 * kStripe * i);
    __m512 offset_f32x16 = _mm512_setzero_ps();
    if (bytes.zero_points) {
      const __m512i zero_i32x16 = _mm512_cvtepi8_epi32(load_16(offsets + kStripe * i));
      offset_f32x16 = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_setzero_si512(), zero_i32x16)), scale_f32x16);
    } else if (bytes.offsets) {
      offset_f32x16 = halves_at(offsets + 2 * kStripe * i);
    }
    for (size_t unit = i * each; unit < std::min((i + 1) * each, units); ++unit) {
      _mm512_storeu_ps(scale + unit * stride, scale_f32x16);
      if (bytes.offsets) _mm512_storeu_ps(offset + unit * stride, offset_f32x16);
    }
  }
}

template <int kBits, bool kLevels, bool kInPlace>
DotStripes dot_for(const ByteTraits& bytes) {
  if constexpr (!kLevels)
    if (bytes.offsets)
      return bytes.by_16 ? dot<kBits, kLevels, true, true, kInPlace> : dot<kBits, kLevels, false, true, kInPlace>;
  return bytes.by_16 ? dot<kBits, kLevels, true, false, kInPlace> : dot<kBits, kLevels, false, false, kInPlace>;
}

template <int kBits, bool kLevels>
TileFunctions of_bits(const ByteTraits& bytes) {
  const bool in_place = bytes.scales == Scales::kHalf && !bytes.zero_points;
  const DotStripes found = in_place ? dot_for<kBits, kLevels, true>(bytes) : dot_for<kBits, kLevels, false>(bytes);
  return {bytes.scales > Scales::kExponent ? expand_nested : expand_plain, unpack<kBits, kLevels>, found, !in_place};
}

}  // namespace

TileFunctions tiles_avx512(const ByteTraits& bytes) {
  if (bytes.levels) return of_bits<4, true>(bytes);
  if (bytes.doubled) return of_bits<1, false>(bytes);
  switch (bytes.bits) {
    case 2:
      return of_bits<2, false>(bytes);
    case 3:
      return of_bits<3, false>(bytes);
    case 4:
      return of_bits<4, false>(bytes);
    case 5:
      return of_bits<5, false>(bytes);
    case 6:
      return of_bits<6, false>(bytes);
    default:
      return of_bits<8, false>(bytes);
  }
}

}  // namespace fewbits
#endif
