// Products of one row of activations with tiles, with AVX2: the two halves of a stripe one after the other, eight rows in a
// register. maddubs adds pairs of products in 16 bits; panels_avx2.cc explains how many fit.
//
// What these loops compute is close to what a core reads meanwhile, so each instruction counts: about 6 for 32 weights of q4_0, 7
// of q4_k. Stripes share what is made of x, and scales are read where they are multiplied.
#pragma once

#include <algorithm>

#include "matmul/tiles.h"
#include "platform/avx2.h"

#if defined(__x86_64__)
namespace fewbits::avx2 {

FEWBITS_AVX2_INLINE __m256i piece_at(const uint8_t* codes, const Piece& piece) {
  const __m256i line_u8x32 = load_32(codes + 64 * piece.line);
  return piece.count == 8 ? line_u8x32 : bits_of(line_u8x32, piece.from, piece.count, piece.to);
}

// 8 rows of a stripe; `at` points to their first bytes.
template <int kBits, bool kLevels>
FEWBITS_AVX2_INLINE void read_steps(const uint8_t* at, __m256i levels_x32, __m256i (&steps)[8]) {
  static constexpr Pieces kPieces = pieces_of<kBits>();
#pragma GCC unroll 8
  for (int k = 0; k < 8; ++k) {
    const auto& [first, second, third] = kPieces[k];
    steps[k] = piece_at(at, first);
    if (second.count) steps[k] = _mm256_or_si256(steps[k], piece_at(at, second));
    if (third.count) steps[k] = _mm256_or_si256(steps[k], piece_at(at, third));
    if constexpr (kLevels) steps[k] = _mm256_shuffle_epi8(levels_x32, steps[k]);
  }
}

// What the codes stand for, signed if that takes 8 bits.
template <bool kSigned>
FEWBITS_AVX2_INLINE __m256i levels_of(const ByteTraits& bytes) {
  if (!bytes.levels) return _mm256_setzero_si256();
  const __m256i levels_u8x32 = _mm256_broadcastsi128_si256(load_16(bytes.levels));
  return kSigned ? _mm256_sub_epi8(levels_u8x32, _mm256_set1_epi8(static_cast<char>(bytes.zero))) : levels_u8x32;
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

// Where scales are read from: what `expand` made of them, or what a chunk begins with. Of the latter the last three are nested:
// integers under one float16.
enum class From : uint8_t { kFloats, kHalves, kExponents, kFourBits, kSixBits, kEightBits };

// kByteBits: bits of the bytes that are multiplied, if these are not the codes themselves.
template <int kBitsOf, int kByteBitsOf, bool kBy16Of, bool kOffsetsOf, From kFromOf>
struct Kind {
  static constexpr int kBits = kBitsOf, kByteBits = kByteBitsOf;
  static constexpr From kFrom = kFromOf;
  static constexpr bool kBy16 = kBy16Of, kOffsets = kOffsetsOf, kSigned = kByteBits == 8, kLevels = kBits != kByteBits;
  static constexpr bool kNested = kFrom > From::kExponents;
  static constexpr int kUnits = kBy16 ? 2 : 1, kSteps = 8 / kUnits;
  // Products with 6-bit codes less 32 are a quarter of those with the codes: four pairs of them fit 16 bits. So what is owed for
  // 32 is added first, in the lanes of the products, and it does not matter that a sum overflows before it is complete.
  static constexpr bool kOwed = kNested && !kOffsets && !kSigned && kBy16;
  static constexpr int kFits = kByteBits <= 4 ? 8 : kByteBits == 5 ? 4 : kByteBits == 6 ? (kOwed ? 4 : 2) : 1;
  static constexpr int kChain = std::min(kFits, kSteps);
  static_assert(!kOwed || kChain == kSteps);
};

// 32 columns of x, as all stripes multiply them.
template <typename Of>
struct Columns {
  __m256i four_i8x32[8];  // four columns in every lane
  __m256i size_u8x32[8];  // their magnitudes, if signed levels multiply them
  __m256i zeros_i32x8[Of::kUnits];
  __m256i owed_i16x16[Of::kUnits];  // the same for nested scales, which multiply it: in the lanes of pairs of products
  __m256 scale_f32x8;
  __m256 sums_f32x8[Of::kUnits];

  FEWBITS_AVX2_INLINE Columns(const ActivationRow& x, size_t b, int zero) : scale_f32x8(_mm256_set1_ps(x.scale[b])) {
    const uint8_t* const q = reinterpret_cast<const uint8_t*>(x.q) + 32 * b;
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      four_i8x32[k] = _mm256_set1_epi32(load<int32_t>(q + 4 * k));
      if constexpr (Of::kSigned && Of::kLevels) size_u8x32[k] = _mm256_abs_epi8(four_i8x32[k]);
    }
    const size_t first = Of::kUnits * b;
#pragma GCC unroll 2
    for (size_t unit = 0; unit < Of::kUnits; ++unit) {
      zeros_i32x8[unit] = _mm256_set1_epi32((Of::kBy16 ? x.zeros_16 : x.zeros)[first + unit]);
      if constexpr (Of::kOffsets && !Of::kNested)
        sums_f32x8[unit] = _mm256_set1_ps((Of::kBy16 ? x.sum_16 : x.sum_32)[first + unit]);
    }
    if constexpr (Of::kNested && !Of::kOffsets) {
      __m256i pairs_i16x16 = _mm256_maddubs_epi16(_mm256_set1_epi8(1), load_32(q));
      pairs_i16x16 = _mm256_add_epi16(pairs_i16x16, _mm256_shuffle_epi32(pairs_i16x16, 0x4e));
      pairs_i16x16 = _mm256_add_epi16(pairs_i16x16, _mm256_shuffle_epi32(pairs_i16x16, 0xb1));
      const __m256i other_i16x16 = _mm256_permute2x128_si256(pairs_i16x16, pairs_i16x16, 1);
      if constexpr (!Of::kBy16) pairs_i16x16 = _mm256_add_epi16(pairs_i16x16, other_i16x16);
      const __m256i minus_i16x16 = _mm256_set1_epi16(static_cast<int16_t>(-zero));
#pragma GCC unroll 2
      for (int unit = 0; unit < Of::kUnits; ++unit) {
        const __m256i here_i16x16 = _mm256_permute4x64_epi64(pairs_i16x16, 0x44);
        const __m256i next_i16x16 = _mm256_permute4x64_epi64(pairs_i16x16, 0xee);
        owed_i16x16[unit] = _mm256_mullo_epi16(unit ? next_i16x16 : here_i16x16, minus_i16x16);
      }
    }
  }
};

// The products of a unit of 8 rows, summed by row and times `by`.
template <typename Of>
FEWBITS_AVX2_INLINE __m256i dot_unit(const __m256i (&steps)[8], const Columns<Of>& x, int unit, __m256i by_i16x16) {
  const bool starts = Of::kSigned || Of::kOwed || (Of::kNested && Of::kOffsets);  // nothing is owed for a zero, or elsewhere
  __m256i sum_i32x8 = starts ? _mm256_setzero_si256() : x.zeros_i32x8[unit];
  if constexpr (Of::kNested && !Of::kOffsets && !Of::kSigned && !Of::kOwed)
    sum_i32x8 = _mm256_madd_epi16(x.owed_i16x16[unit], by_i16x16);
#pragma GCC unroll 8
  for (int k = Of::kSteps * unit; k < Of::kSteps * (unit + 1); k += Of::kChain) {
    __m256i sum_i16x16 = Of::kOwed ? x.owed_i16x16[unit] : _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = k; j < k + Of::kChain; ++j) {
      __m256i w_x32 = steps[j], x_i8x32 = x.four_i8x32[j];
      if constexpr (Of::kSigned && Of::kLevels) {  // no level is -128: it may take the sign of x
        x_i8x32 = _mm256_sign_epi8(w_x32, x_i8x32);
        w_x32 = x.size_u8x32[j];
      } else if constexpr (Of::kSigned) {
        x_i8x32 = _mm256_sign_epi8(x_i8x32, w_x32);
        w_x32 = _mm256_abs_epi8(w_x32);
      }
      const __m256i pairs_i16x16 = _mm256_maddubs_epi16(w_x32, x_i8x32);
      sum_i16x16 = j == k && !Of::kOwed ? pairs_i16x16 : _mm256_add_epi16(sum_i16x16, pairs_i16x16);
    }
    const __m256i wide_i32x8 = _mm256_madd_epi16(sum_i16x16, by_i16x16);
    sum_i32x8 = starts && k == Of::kSteps * unit ? wide_i32x8 : _mm256_add_epi32(sum_i32x8, wide_i32x8);
  }
  return sum_i32x8;
}

// The scale of 8 rows.
template <typename Of>
FEWBITS_AVX2_INLINE __m256 scale_of(const StripeSums& stripe, size_t unit, size_t run, int half) {
  if constexpr (Of::kFrom == From::kHalves) return _mm256_cvtph_ps(load_16(stripe.header + 2 * kStripe * run + 16 * half));
  if constexpr (Of::kFrom == From::kExponents)
    return power_of(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(stripe.header + kStripe * run + 8 * half))));
  return _mm256_load_ps(stripe.scale[unit] + 8 * half);
}

template <typename Of>
FEWBITS_AVX2_INLINE void prefetch_block(const uint8_t* codes) {
  for (int line = 0; line < Of::kBits; ++line)
    _mm_prefetch(reinterpret_cast<const char*>(codes) + kAhead + 64 * line, _MM_HINT_T0);
}

template <typename Of>
FEWBITS_AVX2 void dot(const Tiling& tiling, StripeSums (&stripes)[kStreams], size_t blocks, const ActivationRow& x,
                      size_t first) {
  const __m256i levels_x32 = levels_of<Of::kSigned>(tiling.bytes), ones_i16x16 = _mm256_set1_epi16(1);
  const int shift = std::countr_zero(tiling.unit_of_run());
  for (size_t b = 0; b < blocks; ++b) {
    const Columns<Of> columns(x, first + b, tiling.bytes.zero);
    const size_t run = b >> shift;
    for (size_t k = 0; k < kStreams; ++k) {
      StripeSums& stripe = stripes[k];
      const uint8_t* const codes = stripe.codes + stripe.step * b;
      prefetch_block<Of>(codes);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        __m256 total_f32x8 = _mm256_load_ps(stripe.total + 8 * half);
        __m256i steps[8];
        read_steps<Of::kBits, Of::kLevels>(codes + 32 * half, levels_x32, steps);
#pragma GCC unroll 2
        for (int unit = 0; unit < Of::kUnits; ++unit) {
          const size_t at = Of::kUnits * b + static_cast<size_t>(unit);
          const __m256i sum_i32x8 = dot_unit<Of>(steps, columns, unit, ones_i16x16);
          const __m256 scale_f32x8 = _mm256_mul_ps(scale_of<Of>(stripe, at, run, half), columns.scale_f32x8);
          total_f32x8 = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum_i32x8), scale_f32x8, total_f32x8);
          if constexpr (Of::kOffsets)
            total_f32x8 = _mm256_fmadd_ps(_mm256_load_ps(stripe.offset[at] + 8 * half), columns.sums_f32x8[unit], total_f32x8);
        }
        _mm256_store_ps(stripe.total + 8 * half, total_f32x8);
      }
    }
  }
}

// Integers of scales in planes of six bits, as tiles.cc writes them, to [unit][16 rows] bytes less `zero`.
template <bool kZero>
FEWBITS_AVX2_INLINE void bytes_of_six(const uint8_t* at, size_t units, int zero, uint8_t* into) {
  const __m256i zero_i8x32 = _mm256_set1_epi8(static_cast<char>(zero));
  for (size_t first = 0; first < units; first += 8, at += 96, into += 128) {
    const __m256i top_u8x32 = load_32(at + 64);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // two units
      const __m256i six_u8x32 =
          _mm256_or_si256(bits_of(load_32(at + i % 2 * 32), i / 2 * 4, 4, 0), bits_of(top_u8x32, 2 * i, 2, 4));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(into + 32 * i), kZero ? _mm256_sub_epi8(six_u8x32, zero_i8x32) : six_u8x32);
    }
  }
}

// The integers of a stripe's scales and what its rows have summed of a chunk, before it is multiplied by d.
struct NestedSums {
  alignas(32) uint8_t six[2][16 * kStripe];
  alignas(32) float scaled[kStripe], least[kStripe];
  const uint8_t *sub, *min;  // [unit][16 rows]; of four bits in the same byte
};

// As 16-bit numbers, each twice: eight of sixteen rows.
template <typename Of>
FEWBITS_AVX2_INLINE __m256i words_of(const uint8_t* sub, int half) {
  const __m256i place_u8x32 = Of::kOffsets ? _mm256_setr_epi8(0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1,  //
                                                              4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7, -1)
                                           : _mm256_setr_epi8(-1, 0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3,  //
                                                              -1, 4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7);
  const __m256i bytes_x32 = _mm256_set1_epi64x(load<int64_t>(sub + 8 * half));
  const __m256i words_x16 = _mm256_shuffle_epi8(bytes_x32, place_u8x32);
  if constexpr (Of::kFrom == From::kFourBits) return _mm256_and_si256(words_x16, _mm256_set1_epi16(15));
  return Of::kOffsets ? words_x16 : _mm256_srai_epi16(words_x16, 8);  // only minima go with unsigned scales
}

template <typename Of>
FEWBITS_AVX2_INLINE __m256 minimum_of(const uint8_t* min, int half) {
  const __m256i m_i32x8 = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(min + 8 * half)));
  return _mm256_cvtepi32_ps(Of::kFrom == From::kFourBits ? _mm256_srli_epi32(m_i32x8, 4) : m_i32x8);
}

// `sum`: of x, scaled, for each of the chunk's units.
template <typename Of>
FEWBITS_AVX2_INLINE void begin_nested(const Tiling& tiling, const StripeSums& stripe, size_t blocks, const float* sum,
                                      NestedSums& sums) {
  const uint8_t* const at = stripe.header + (Of::kOffsets ? 4 : 2) * kStripe;
  sums.sub = sums.min = at;
  if constexpr (Of::kFrom == From::kSixBits) {
    const size_t units = tiling.units(blocks);
    bytes_of_six<!Of::kOffsets>(at, units, tiling.bytes.sub_zero, sums.six[0]);
    if constexpr (Of::kOffsets) bytes_of_six<false>(at + tiling.integer_bytes(blocks), units, 0, sums.six[1]);
    sums.sub = sums.six[0], sums.min = sums.six[1];
  }
  for (size_t row = 0; row < kStripe; ++row) sums.scaled[row] = 0;
  if constexpr (Of::kOffsets) {
    __m256 least_f32x8[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (size_t unit = 0; unit < Of::kUnits * blocks; ++unit)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half)
        least_f32x8[half] =
            _mm256_fmadd_ps(minimum_of<Of>(sums.min + kStripe * unit, half), _mm256_set1_ps(sum[unit]), least_f32x8[half]);
    for (int half = 0; half < 2; ++half) _mm256_store_ps(sums.least + 8 * half, least_f32x8[half]);
  }
}

// Scales that are integers multiply the integer sums, where these are widened anyway, and no float is made of them.
template <typename Of>
FEWBITS_AVX2 void dot_nested(const Tiling& tiling, StripeSums (&stripes)[kStreams], size_t blocks, const ActivationRow& x,
                             size_t first) {
  const __m256i levels_x32 = levels_of<Of::kSigned>(tiling.bytes);
  NestedSums nested[kStreams];
  for (size_t k = 0; k < kStreams; ++k)
    begin_nested<Of>(tiling, stripes[k], blocks, (Of::kBy16 ? x.sum_16 : x.sum_32) + Of::kUnits * first, nested[k]);
  for (size_t b = 0; b < blocks; ++b) {
    const Columns<Of> columns(x, first + b, tiling.bytes.zero);
    for (size_t k = 0; k < kStreams; ++k) {
      const uint8_t* const codes = stripes[k].codes + stripes[k].step * b;
      prefetch_block<Of>(codes);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        __m256i steps[8], sum_i32x8;
        read_steps<Of::kBits, Of::kLevels>(codes + 32 * half, levels_x32, steps);
#pragma GCC unroll 2
        for (int unit = 0; unit < Of::kUnits; ++unit) {
          const size_t at = kStripe * (Of::kUnits * b + static_cast<size_t>(unit));
          const __m256i by_i16x16 = words_of<Of>(nested[k].sub + at, half);
          const __m256i scaled_i32x8 = dot_unit<Of>(steps, columns, unit, by_i16x16);
          sum_i32x8 = unit ? _mm256_add_epi32(sum_i32x8, scaled_i32x8) : scaled_i32x8;
        }
        float* const scaled = nested[k].scaled + 8 * half;
        _mm256_store_ps(scaled, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum_i32x8), columns.scale_f32x8, _mm256_load_ps(scaled)));
      }
    }
  }
  for (size_t k = 0; k < kStreams; ++k)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      float* const into = stripes[k].total + 8 * half;
      const uint8_t* const d = stripes[k].header + 16 * half;
      __m256 total_f32x8 = _mm256_load_ps(into);
      total_f32x8 = _mm256_fmadd_ps(_mm256_load_ps(nested[k].scaled + 8 * half), _mm256_cvtph_ps(load_16(d)), total_f32x8);
      if constexpr (Of::kOffsets)
        total_f32x8 =
            _mm256_fnmadd_ps(_mm256_load_ps(nested[k].least + 8 * half), _mm256_cvtph_ps(load_16(d + 2 * kStripe)), total_f32x8);
      _mm256_store_ps(into, total_f32x8);
    }
}

}  // namespace fewbits::avx2
#endif
