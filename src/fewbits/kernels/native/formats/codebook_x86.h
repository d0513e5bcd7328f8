// codebook.h for AVX2: a block's indices, signs and scales are computed at once, then 32 columns are looked up at a time.
#pragma once

#include "formats/codebook.h"
#include "formats/reader_x86.h"

#if defined(__x86_64__)
namespace fewbits {

// What `read_avx2` of a format fills.
template <typename Format>
struct PointsAvx2 {
  alignas(32) uint16_t index[256 / Format::kDims];
  alignas(32) uint8_t signs[32];  // as PointCodes has them; if they are shifts, 1 or -1
  alignas(32) float scale[256 / Format::kRun];
};

template <typename Format>
struct CodebookAvx2 : CodebookReader<Format> {
  PointsAvx2<Format> points;

  FEWBITS_AVX2_INLINE CodebookAvx2(const Layout& layout, RowOf parts, size_t b) : CodebookReader<Format>(layout, parts, b) {
    Format::read_avx2(this->block, points);
    asm(""
        : "+m"(
            points));  // from here on in memory: taking indices out of registers, as compilers would, is slower than loading them
  }

  FEWBITS_AVX2_INLINE void scales(float* scale, float*) const {
#pragma GCC unroll 2
    for (size_t i = 0; i < 256 / Format::kRun; i += 8) _mm256_storeu_ps(scale + i, _mm256_load_ps(points.scale + i));
  }

  FEWBITS_AVX2_INLINE __m256i bytes(size_t i) const {
    const __m256i bytes_u8x32 = lines(i);
    if constexpr (Format::kShifts) {
      const __m256i shifts_i8x4 = _mm256_set1_epi32(load<int32_t>(points.signs + 4 * i));
      const __m256i line_u8x32 = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,  //
                                                  2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
      return _mm256_add_epi8(bytes_u8x32, _mm256_shuffle_epi8(shifts_i8x4, line_u8x32));
    } else {
      const __m256i negative_x32 = spread_bits(load<uint32_t>(points.signs + 4 * i));
      const __m256i signed_i8x32 = _mm256_sub_epi8(_mm256_xor_si256(bytes_u8x32, negative_x32), negative_x32);
      return _mm256_add_epi8(signed_i8x32, _mm256_set1_epi8(Format::kZero));
    }
  }

  // Products take magnitudes as they are, and give the signs to x: fewer instructions, and no zero to correct.
  FEWBITS_AVX2_INLINE __m256i magnitudes(size_t i) const
    requires(!Format::kShifts)
  {
    return lines(i);
  }
  FEWBITS_AVX2_INLINE __m256i with_signs(size_t i, __m256i x_i8x32) const {
    const __m256i negative_x32 = spread_bits(load<uint32_t>(points.signs + 4 * i));
    return _mm256_sign_epi8(x_i8x32, _mm256_or_si256(negative_x32, _mm256_set1_epi8(1)));
  }

 private:
  FEWBITS_AVX2_INLINE __m256i lines(size_t i) const { return _mm256_set_m128i(two_lines(8 * i + 4), two_lines(8 * i)); }

  // 16 columns: two points of eight, or four of four from `four`, which counts fours of columns.
  FEWBITS_AVX2_INLINE __m128i two_lines(size_t four) const {
    const uint8_t* const grid = Format::codebook.bytes;
    if constexpr (Format::kDims == 8) {
      const uint16_t* const at = points.index + four / 2;
      const __m128i low_u8x8 = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(grid + 8 * size_t{at[0]}));
      return _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(low_u8x8), reinterpret_cast<const __m64*>(grid + 8 * size_t{at[1]})));
    } else {
      const uint16_t* const at = points.index + four;
      const auto point = [&](size_t k) { return load<int32_t>(grid + 4 * size_t{at[k]}); };
      return _mm_setr_epi32(point(0), point(1), point(2), point(3));
    }
  }
};

// Bytes of seven bits each: the eighth makes the number of ones even.
FEWBITS_AVX2_INLINE __m256i with_parity(__m256i seven_u8x32) {
  alignas(16) static constexpr uint8_t kOdd[16] = {0, 128, 128, 0, 128, 0, 0, 128, 128, 0, 0, 128, 0, 128, 128, 0};
  const __m256i nibble_u8x32 = _mm256_set1_epi8(15);
  const __m256i low_u8x32 = look_up(kOdd, _mm256_and_si256(seven_u8x32, nibble_u8x32));
  const __m256i high_u8x32 = look_up(kOdd, _mm256_and_si256(_mm256_srli_epi16(seven_u8x32, 4), nibble_u8x32));
  return _mm256_or_si256(seven_u8x32, _mm256_xor_si256(low_u8x32, high_u8x32));
}

// Four times seven bits of each number, in its four bytes.
FEWBITS_AVX2_INLINE __m256i signs_of_words(__m256i words_u32x8) {
  const auto byte = [&](int i) __attribute__((always_inline, target("avx2"))) {
    return _mm256_and_si256(_mm256_slli_epi32(words_u32x8, i), _mm256_set1_epi32(127 << (8 * i)));
  };
  return with_parity(_mm256_or_si256(_mm256_or_si256(byte(0), byte(1)), _mm256_or_si256(byte(2), byte(3))));
}

FEWBITS_AVX2_INLINE void store_32(void* at, __m256i values) { _mm256_store_si256(static_cast<__m256i*>(at), values); }

FEWBITS_AVX2_INLINE __m256i wide_16(const uint8_t* at) { return _mm256_cvtepu8_epi16(load_16(at)); }

// unit * (2s + 1)
FEWBITS_AVX2_INLINE void store_scales(__m256i s_i32x8, float unit, float* into) {
  const __m256i odd_i32x8 = _mm256_or_si256(_mm256_slli_epi32(s_i32x8, 1), _mm256_set1_epi32(1));
  _mm256_store_ps(into, _mm256_mul_ps(_mm256_cvtepi32_ps(odd_i32x8), _mm256_set1_ps(unit)));
}

// Nibbles of the first eight bytes, the low one first.
FEWBITS_AVX2_INLINE __m128i nibbles_in_order(__m128i bytes_u8x16) {
  const __m128i nibble_u8x16 = _mm_set1_epi8(15);
  return _mm_unpacklo_epi8(_mm_and_si128(bytes_u8x16, nibble_u8x16), _mm_and_si128(_mm_srli_epi16(bytes_u8x16, 4), nibble_u8x16));
}

}  // namespace fewbits
#endif
