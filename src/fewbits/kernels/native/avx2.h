// What the AVX2 kernels share. Functions are compiled for AVX2 one by one, so that the rest runs on every x86-64.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"

// Without FMA, so that nothing can be fused where the reference rounds twice. Every product so far is exact in float32's 24
// bits (float16 scale 11 + sub-scale 6 + code 4, or 11 + 8), so fusing changed no bit when tried; wider fields would differ.
#define FEWBITS_AVX2 __attribute__((target("avx2,f16c")))

namespace fewbits {

inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }

FEWBITS_AVX2 inline float float16_at_avx2(const uint8_t* at) { return _cvtsh_ss(load<uint16_t>(at)); }

FEWBITS_AVX2 inline __m128i load_16(const uint8_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }
FEWBITS_AVX2 inline __m256i load_32(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

// out[0..15] = scale * q
FEWBITS_AVX2 inline void scale_16(__m128i q_i8x16, __m256 scale_f32x8, float* out) {
  const __m256i first_i32x8 = _mm256_cvtepi8_epi32(q_i8x16);
  const __m256i second_i32x8 = _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(q_i8x16, q_i8x16));
  _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtepi32_ps(first_i32x8), scale_f32x8));
  _mm256_storeu_ps(out + 8, _mm256_mul_ps(_mm256_cvtepi32_ps(second_i32x8), scale_f32x8));
}

}  // namespace fewbits
#endif
