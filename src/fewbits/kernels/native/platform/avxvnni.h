// AVX-VNNI: the products of four bytes in 256 bits, for processors without AVX-512 (Alder Lake and later, Zen 5 too). Everything
// else is AVX2.
#pragma once

#if defined(__x86_64__)
#include "platform/avx2.h"

#define FEWBITS_AVXVNNI __attribute__((target("avx2,fma,f16c,avxvnni")))
#define FEWBITS_AVXVNNI_INLINE inline __attribute__((always_inline, target("avx2,fma,f16c,avxvnni")))

namespace fewbits {

inline bool has_avxvnni() { return has_avx2() && __builtin_cpu_supports("avxvnni"); }

// As in avx512.h.
namespace avxvnni {

using Ints = __m256i;
using Floats = __m256;
constexpr size_t kLanes = 8;

FEWBITS_AVXVNNI_INLINE Ints load_ints(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
FEWBITS_AVXVNNI_INLINE void store_ints(void* at, Ints v) { _mm256_storeu_si256(static_cast<__m256i*>(at), v); }
FEWBITS_AVXVNNI_INLINE Ints all_ints(int32_t v) { return _mm256_set1_epi32(v); }
FEWBITS_AVXVNNI_INLINE Ints all_bytes(int v) { return _mm256_set1_epi8(static_cast<char>(v)); }
FEWBITS_AVXVNNI_INLINE Ints both(Ints a, Ints b) { return _mm256_or_si256(a, b); }
FEWBITS_AVXVNNI_INLINE Ints masked(Ints a, Ints b) { return _mm256_and_si256(a, b); }
FEWBITS_AVXVNNI_INLINE Ints flipped(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
template <int kBits>
FEWBITS_AVXVNNI_INLINE Ints right_16(Ints a) {
  return _mm256_srli_epi16(a, kBits);
}
template <int kBits>
FEWBITS_AVXVNNI_INLINE Ints left_16(Ints a) {
  return _mm256_slli_epi16(a, kBits);
}
FEWBITS_AVXVNNI_INLINE Ints spread_16_bytes(const uint8_t* at) { return _mm256_broadcastsi128_si256(load_16(at)); }
FEWBITS_AVXVNNI_INLINE Ints looked_up(Ints table_u8, Ints index_u8) { return _mm256_shuffle_epi8(table_u8, index_u8); }
FEWBITS_AVXVNNI_INLINE Ints dpbusd(Ints sum_i32, Ints w_u8, Ints x_i8) { return _mm256_dpbusd_avx_epi32(sum_i32, w_u8, x_i8); }
FEWBITS_AVXVNNI_INLINE Ints dpbusd_256(Ints sum_i32, Ints w_u8, Ints x_i8) { return dpbusd(sum_i32, w_u8, x_i8); }
FEWBITS_AVXVNNI_INLINE int32_t sum_of_ints(Ints v) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}
FEWBITS_AVXVNNI_INLINE Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
FEWBITS_AVXVNNI_INLINE Floats load_floats(const float* at) { return _mm256_loadu_ps(at); }
FEWBITS_AVXVNNI_INLINE void store_floats(float* at, Floats v) { _mm256_storeu_ps(at, v); }
FEWBITS_AVXVNNI_INLINE Floats all_floats(float v) { return _mm256_set1_ps(v); }
FEWBITS_AVXVNNI_INLINE Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
FEWBITS_AVXVNNI_INLINE Floats times_plus(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
FEWBITS_AVXVNNI_INLINE Floats load_halves(const uint8_t* at) { return _mm256_cvtph_ps(load_16(at)); }

}  // namespace avxvnni
}  // namespace fewbits
#endif
