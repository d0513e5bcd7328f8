// What the AVX2 kernels share. Functions are compiled for AVX2 one by one, so that the rest runs on every x86-64.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"

// Only explicit intrinsics fuse: the module is compiled with -ffp-contract=off, so that decoding rounds as the reference does.
#define FEWBITS_AVX2 __attribute__((target("avx2,fma,f16c")))
#define FEWBITS_AVX2_INLINE inline __attribute__((always_inline, target("avx2,fma,f16c")))

namespace fewbits {

inline bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

FEWBITS_AVX2 inline float float16_at_avx2(const uint8_t* at) { return _cvtsh_ss(load<uint16_t>(at)); }

FEWBITS_AVX2 inline __m128i load_16(const uint8_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }
FEWBITS_AVX2 inline __m256i load_32(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

// Low nibbles of 16 bytes, then their high ones. Loading them twice costs no arithmetic.
FEWBITS_AVX2_INLINE __m256i nibbles_by_half(const uint8_t* at) {
  const __m256i twice_u8x32 = _mm256_broadcastsi128_si256(load_16(at));
  const __m256i shifted_u8x32 = _mm256_srlv_epi32(twice_u8x32, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
  return _mm256_and_si256(shifted_u8x32, _mm256_set1_epi8(15));
}

// A sum, now: GCC else gathers the additions of an unrolled loop at its end, and stores the terms until then.
FEWBITS_AVX2_INLINE __m256i now(__m256i sum_x32) {
  asm("" : "+x"(sum_x32));
  return sum_x32;
}

// A float16 in all lanes.
FEWBITS_AVX2_INLINE __m256 float16_lanes(const uint8_t* at) { return _mm256_cvtph_ps(_mm_set1_epi16(load<int16_t>(at))); }

// Bits `from` and up of each byte, `count` of them, moved to bit `to`. Bits that cross into a neighbour are masked away.
FEWBITS_AVX2_INLINE __m256i bits_of(__m256i bytes_u8x32, int from, int count, int to) {
  const __m256i moved_u8x32 = from >= to ? _mm256_srli_epi16(bytes_u8x32, from - to) : _mm256_slli_epi16(bytes_u8x32, to - from);
  return _mm256_and_si256(moved_u8x32, _mm256_set1_epi8(static_cast<char>(((1 << count) - 1) << to)));
}

// Bit j of `bits` in byte j: all ones where it is set.
FEWBITS_AVX2_INLINE __m256i spread_bits(uint32_t bits) {
  const __m256i byte_of_u8x32 = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,  //
                                                 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i bit_u8x32 = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  const __m256i bytes_u8x32 = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int32_t>(bits)), byte_of_u8x32);
  return _mm256_cmpeq_epi8(_mm256_and_si256(bytes_u8x32, bit_u8x32), bit_u8x32);
}

FEWBITS_AVX2_INLINE __m256i look_up(const uint8_t* table_of_16, __m256i index_u8x32) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_16(table_of_16)), index_u8x32);
}

// out[0..7] = factor * the first eight signed (or unsigned) bytes
FEWBITS_AVX2_INLINE void scale_8_signed(__m128i q_i8x16, float factor, float* out) {
  _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q_i8x16)), _mm256_set1_ps(factor)));
}

}  // namespace fewbits
#endif
