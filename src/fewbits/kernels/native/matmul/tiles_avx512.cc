// tiles_vnni.inc with AVX-512: a stripe in a register.
#include "matmul/tiles.h"
#include "platform/avx512.h"

#if defined(__x86_64__)
namespace fewbits {
namespace {

using namespace avx512;

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
  const __m512 d_f32x16 = load_halves(chunk);
  const uint8_t* at = chunk + 2 * kStripe;
  __m512 minus_dmin_f32x16 = _mm512_setzero_ps();
  if (bytes.offsets) {
    minus_dmin_f32x16 = _mm512_sub_ps(_mm512_set1_ps(-0.0f), load_halves(at));
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
    const __m512 scale_f32x16 = exponents ? power_of(load_16(chunk + kStripe * i)) : load_halves(chunk + 2 * kStripe * i);
    __m512 offset_f32x16 = _mm512_setzero_ps();
    if (bytes.zero_points) {
      const __m512i zero_i32x16 = _mm512_cvtepi8_epi32(load_16(offsets + kStripe * i));
      offset_f32x16 = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_setzero_si512(), zero_i32x16)), scale_f32x16);
    } else if (bytes.offsets) {
      offset_f32x16 = load_halves(offsets + 2 * kStripe * i);
    }
    for (size_t unit = i * each; unit < std::min((i + 1) * each, units); ++unit) {
      _mm512_storeu_ps(scale + unit * stride, scale_f32x16);
      if (bytes.offsets) _mm512_storeu_ps(offset + unit * stride, offset_f32x16);
    }
  }
}

ExpandScales expand_for(const ByteTraits& bytes) { return bytes.scales > Scales::kExponent ? expand_nested : expand_plain; }

#define FEWBITS_ISA FEWBITS_AVX512
#define FEWBITS_ISA_INLINE FEWBITS_AVX512_INLINE
#include "matmul/tiles_vnni.inc"
#undef FEWBITS_ISA
#undef FEWBITS_ISA_INLINE

}  // namespace

TileFunctions tiles_avx512(const ByteTraits& bytes) { return tiles_for(bytes); }

}  // namespace fewbits
#endif
