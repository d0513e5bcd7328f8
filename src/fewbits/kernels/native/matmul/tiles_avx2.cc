// tiles.h with AVX2: the two halves of a stripe one after the other, eight rows in a register. maddubs adds pairs of products in
// 16 bits; panels_avx2.cc explains how many fit. 8-bit codes are made signed for it.
#include "matmul/tiles.h"
#include "platform/avx2.h"

#if defined(__x86_64__)
namespace fewbits {
namespace {

// The steps of a plane of kBits bits, at bit kTo of the bytes.
template <int kBits, int kTo, bool kAdd>
FEWBITS_AVX2_INLINE void read_plane(const uint8_t* at, __m256i (&steps)[8]) {
#pragma GCC unroll 8
  for (int k = 0; k < 8; ++k) {
    const __m256i bits_u8x32 = bits_of(load_32(at + 64 * (k % kBits)), k / kBits * kBits, kBits, kTo);
    steps[k] = kAdd ? _mm256_or_si256(steps[k], bits_u8x32) : bits_u8x32;
  }
}

// 8 rows of a stripe; `at` points to their first bytes.
template <int kBits, bool kLevels>
FEWBITS_AVX2_INLINE void read_steps(const uint8_t* at, const uint8_t* levels, __m256i (&steps)[8]) {
  if constexpr (kBits == 8) {
    for (int k = 0; k < 8; ++k) steps[k] = load_32(at + 64 * k);
  } else if constexpr (kBits >= 4) {
    read_plane<4, 0, false>(at, steps);
    if constexpr (kBits == 5) read_plane<1, 4, true>(at + 256, steps);
    if constexpr (kBits == 6) read_plane<2, 4, true>(at + 256, steps);
  } else if constexpr (kBits == 1) {
    read_plane<1, 1, false>(at, steps);  // bytes of 0 and 2
  } else {
    read_plane<2, 0, false>(at, steps);
    if constexpr (kBits == 3) read_plane<1, 2, true>(at + 128, steps);
  }
  if constexpr (kLevels)
    for (int k = 0; k < 8; ++k) steps[k] = look_up(levels, steps[k]);
}

// kByteBits: bits of the bytes that are multiplied, if these are not the codes themselves.
template <int kBits, int kByteBits, bool kBy16, bool kOffsets>
FEWBITS_AVX2 void dot(const Tiling& tiling, StripeSums (&stripes)[kStreams], size_t blocks, const ActivationRow& x,
                      size_t first) {
  constexpr int kUnits = kBy16 ? 2 : 1, kSteps = 8 / kUnits;
  constexpr int kChain = std::min(kByteBits <= 4 ? 8 : kByteBits == 5 ? 4 : kByteBits == 6 ? 2 : 1, kSteps);
  constexpr bool kSigned = kByteBits == 8;
  const __m256i ones_i16x16 = _mm256_set1_epi16(1), zero_u8x32 = _mm256_set1_epi8(static_cast<char>(tiling.bytes.zero));
  for (size_t b = 0; b < blocks; ++b) {
    const __m256 x_scale_f32x8 = _mm256_set1_ps(x.scale[first + b]);
    for (StripeSums& stripe : stripes) {
      const uint8_t* const codes = stripe.codes + 64 * kBits * b;
      for (int line = 0; line < kBits; ++line)
        _mm_prefetch(reinterpret_cast<const char*>(codes) + kAhead + 64 * line, _MM_HINT_T0);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        __m256 total_f32x8 = _mm256_load_ps(stripe.total + 8 * half);
        __m256i steps[8];
        read_steps<kBits, kBits != kByteBits>(codes + 32 * half, tiling.bytes.levels, steps);
#pragma GCC unroll 2
        for (int unit = 0; unit < kUnits; ++unit) {
          __m256i sum_i32x8 = _mm256_setzero_si256();
          if constexpr (!kSigned) sum_i32x8 = _mm256_set1_epi32(kBy16 ? x.zeros_16[2 * (first + b) + unit] : x.zeros[first + b]);
#pragma GCC unroll 8
          for (int k = kSteps * unit; k < kSteps * (unit + 1); k += kChain) {
            __m256i sum_i16x16 = _mm256_setzero_si256();
#pragma GCC unroll 8
            for (int j = k; j < k + kChain; ++j) {
              int32_t four;
              std::memcpy(&four, x.q + 32 * (first + b) + 4 * j, 4);
              const __m256i x_i8x32 = _mm256_set1_epi32(four);
              __m256i pairs_i16x16;
              if constexpr (kSigned) {
                const __m256i w_i8x32 = _mm256_sub_epi8(steps[j], zero_u8x32);
                pairs_i16x16 = _mm256_maddubs_epi16(_mm256_abs_epi8(w_i8x32), _mm256_sign_epi8(x_i8x32, w_i8x32));
              } else {
                pairs_i16x16 = _mm256_maddubs_epi16(steps[j], x_i8x32);
              }
              sum_i16x16 = j == k ? pairs_i16x16 : _mm256_add_epi16(sum_i16x16, pairs_i16x16);
            }
            sum_i32x8 = _mm256_add_epi32(sum_i32x8, _mm256_madd_epi16(sum_i16x16, ones_i16x16));
          }
          const size_t at = kUnits * b + unit;
          const __m256 scale_f32x8 = _mm256_mul_ps(_mm256_load_ps(stripe.scale[at] + 8 * half), x_scale_f32x8);
          total_f32x8 = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum_i32x8), scale_f32x8, total_f32x8);
          if constexpr (kOffsets) {
            const __m256 sum_f32x8 = _mm256_set1_ps((kBy16 ? x.sum_16 : x.sum_32)[kUnits * first + at]);
            total_f32x8 = _mm256_fmadd_ps(_mm256_load_ps(stripe.offset[at] + 8 * half), sum_f32x8, total_f32x8);
          }
        }
        _mm256_store_ps(stripe.total + 8 * half, total_f32x8);
      }
    }
  }
}

// AVX2's panels hold 8-bit codes as signed bytes.
template <int kBits, int kByteBits>
FEWBITS_AVX2 void unpack(const Tiling& tiling, const uint8_t* codes, size_t blocks, size_t lane, uint8_t (*into)[kPanelRows][4]) {
  const __m256i zero_u8x32 = _mm256_set1_epi8(static_cast<char>(tiling.bytes.zero));
  for (size_t b = 0; b < blocks; ++b, codes += 64 * kBits) {
    for (int line = 0; line < kBits; ++line) _mm_prefetch(reinterpret_cast<const char*>(codes) + kAhead + 64 * line, _MM_HINT_T0);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m256i steps[8];
      read_steps<kBits, kBits != kByteBits>(codes + 32 * half, tiling.bytes.levels, steps);
      for (int k = 0; k < 8; ++k) {
        const __m256i bytes_x32 = kByteBits == 8 ? _mm256_sub_epi8(steps[k], zero_u8x32) : steps[k];
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(into[8 * b + k][lane + 8 * half]), bytes_x32);
      }
    }
  }
}

// 16 floats in two registers.
struct Lanes {
  __m256 low, high;
};

FEWBITS_AVX2_INLINE Lanes halves_at(const uint8_t* at) {
  return {_mm256_cvtph_ps(load_16(at)), _mm256_cvtph_ps(load_16(at + 16))};
}

template <bool kSigned>
FEWBITS_AVX2_INLINE Lanes floats_of(__m128i bytes_x16) {
  const __m128i high_x16 = _mm_unpackhi_epi64(bytes_x16, bytes_x16);
  if constexpr (kSigned)
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes_x16)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high_x16))};
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes_x16)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(high_x16))};
}

FEWBITS_AVX2_INLINE Lanes times(const Lanes& a, const Lanes& b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}

FEWBITS_AVX2_INLINE Lanes negative(const Lanes& a) {
  const __m256 sign_f32x8 = _mm256_set1_ps(-0.0f);
  return {_mm256_xor_ps(a.low, sign_f32x8), _mm256_xor_ps(a.high, sign_f32x8)};
}

FEWBITS_AVX2_INLINE void store(float* at, const Lanes& lanes) {
  _mm256_storeu_ps(at, lanes.low);
  _mm256_storeu_ps(at + 8, lanes.high);
}

// out[unit] = factor * (integer - zero), from the planes that tiles.cc writes.
FEWBITS_AVX2_INLINE void expand_six(const uint8_t* at, size_t units, int zero, const Lanes& factor, float* out, size_t stride) {
  const __m128i nibble_u8x16 = _mm_set1_epi8(15), top_u8x16 = _mm_set1_epi8(48),
                zero_i8x16 = _mm_set1_epi8(static_cast<char>(zero));
  for (size_t first = 0; first < units; first += 8, at += 96)
    for (size_t i = 0; i < 8; ++i) {
      const int from = static_cast<int>(i / 2 * 2);
      const __m128i low_u8x16 =
          _mm_and_si128(_mm_srli_epi16(load_16(at + 16 * (i % 4)), static_cast<int>(i / 4 * 4)), nibble_u8x16);
      const __m128i both_u8x16 = load_16(at + 64 + 16 * (i % 2));
      const __m128i moved_u8x16 = from >= 4 ? _mm_srli_epi16(both_u8x16, from - 4) : _mm_slli_epi16(both_u8x16, 4 - from);
      const __m128i six_u8x16 = _mm_or_si128(low_u8x16, _mm_and_si128(moved_u8x16, top_u8x16));
      store(out + (first + i) * stride, times(floats_of<true>(_mm_sub_epi8(six_u8x16, zero_i8x16)), factor));
    }
}

FEWBITS_AVX2 void expand_nested(const Tiling& tiling, const uint8_t* chunk, size_t blocks, float* scale, float* offset,
                                size_t stride) {
  const ByteTraits& bytes = tiling.bytes;
  const size_t units = tiling.units(blocks);
  const Lanes d = halves_at(chunk), minus_dmin = negative(halves_at(chunk + (bytes.offsets ? 2 * kStripe : 0)));
  const uint8_t* const at = chunk + (bytes.offsets ? 4 : 2) * kStripe;
  if (bytes.scales == Scales::kSixBits) {
    expand_six(at, units, bytes.sub_zero, d, scale, stride);
    if (bytes.offsets) expand_six(at + tiling.integer_bytes(blocks), units, 0, minus_dmin, offset, stride);
    return;
  }
  const __m128i nibble_u8x16 = _mm_set1_epi8(15);
  for (size_t i = 0; i < units; ++i) {
    const __m128i bytes_x16 = load_16(at + kStripe * i);
    if (bytes.scales == Scales::kEightBits) {
      store(scale + i * stride, times(floats_of<true>(bytes_x16), d));
    } else {
      store(scale + i * stride, times(floats_of<false>(_mm_and_si128(bytes_x16, nibble_u8x16)), d));
      store(offset + i * stride, times(floats_of<false>(_mm_and_si128(_mm_srli_epi16(bytes_x16, 4), nibble_u8x16)), minus_dmin));
    }
  }
}

// 2^(e - 128), by bits: the two smallest are subnormal, and 255 is NaN.
FEWBITS_AVX2_INLINE __m256 power_of(__m256i e_i32x8) {
  const __m256i normal_i32x8 = _mm256_slli_epi32(_mm256_sub_epi32(e_i32x8, _mm256_set1_epi32(1)), 23);
  const __m256i small_i32x8 = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e_i32x8);
  const __m256i is_small_i32x8 = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e_i32x8);
  const __m256i is_nan_i32x8 = _mm256_cmpeq_epi32(e_i32x8, _mm256_set1_epi32(255));
  const __m256i value_i32x8 = _mm256_blendv_epi8(normal_i32x8, small_i32x8, is_small_i32x8);
  return _mm256_castsi256_ps(_mm256_blendv_epi8(value_i32x8, _mm256_set1_epi32(0x7fc00000), is_nan_i32x8));
}

FEWBITS_AVX2 void expand_plain(const Tiling& tiling, const uint8_t* chunk, size_t blocks, float* scale, float* offset,
                               size_t stride) {
  const ByteTraits& bytes = tiling.bytes;
  const bool exponents = bytes.scales == Scales::kExponent;
  const size_t runs = tiling.runs(blocks), units = tiling.units(blocks), each = tiling.unit_of_run();
  const uint8_t* const offsets = chunk + runs * kStripe * (exponents ? 1 : 2);
  for (size_t i = 0; i < runs; ++i) {
    Lanes here, beside{};
    if (exponents) {
      const __m128i e_u8x16 = load_16(chunk + kStripe * i);
      here = {power_of(_mm256_cvtepu8_epi32(e_u8x16)), power_of(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(e_u8x16, e_u8x16)))};
    } else {
      here = halves_at(chunk + 2 * kStripe * i);
    }
    if (bytes.zero_points)
      beside = times(negative(floats_of<true>(load_16(offsets + kStripe * i))), here);
    else if (bytes.offsets)
      beside = halves_at(offsets + 2 * kStripe * i);
    for (size_t unit = i * each; unit < std::min((i + 1) * each, units); ++unit) {
      store(scale + unit * stride, here);
      if (bytes.offsets) store(offset + unit * stride, beside);
    }
  }
}

template <int kBits, int kByteBits = kBits>
TileFunctions of_bits(const ByteTraits& bytes) {
  const ExpandScales expand = bytes.scales > Scales::kExponent ? expand_nested : expand_plain;
  DotStripes found = bytes.by_16 ? dot<kBits, kByteBits, true, false> : dot<kBits, kByteBits, false, false>;
  if constexpr (kBits == kByteBits)
    if (bytes.offsets) found = bytes.by_16 ? dot<kBits, kByteBits, true, true> : dot<kBits, kByteBits, false, true>;
  return {expand, unpack<kBits, kByteBits>, found};
}

}  // namespace

TileFunctions tiles_avx2(const ByteTraits& bytes) {
  if (bytes.doubled) return of_bits<1>(bytes);
  if (bytes.levels) return bytes.bits == 8 ? of_bits<4, 8>(bytes) : of_bits<4, 5>(bytes);
  switch (bytes.bits) {
    case 2:
      return of_bits<2>(bytes);
    case 3:
      return of_bits<3>(bytes);
    case 4:
      return of_bits<4>(bytes);
    case 5:
      return of_bits<5>(bytes);
    case 6:
      return of_bits<6>(bytes);
    default:
      return of_bits<8>(bytes);
  }
}

}  // namespace fewbits
#endif
