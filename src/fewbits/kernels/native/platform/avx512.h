// What the AVX-512 kernels share: 512-bit lanes, byte operations and VNNI's products of four bytes.
#pragma once

#if defined(__x86_64__)
#include "platform/avx2.h"

#define FEWBITS_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#define FEWBITS_AVX512_INLINE \
  inline __attribute__((always_inline, target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))

namespace fewbits {

inline bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

// The registers of the sources that AVX-512 and AVX-VNNI (avxvnni.h) share, matmul/*_vnni.inc, and what is done with them.
namespace avx512 {

using Ints = __m512i;
using Floats = __m512;
constexpr size_t kLanes = 16;

FEWBITS_AVX512_INLINE Ints load_ints(const void* at) { return _mm512_loadu_si512(at); }
FEWBITS_AVX512_INLINE void store_ints(void* at, Ints v) { _mm512_storeu_si512(at, v); }
FEWBITS_AVX512_INLINE Ints all_ints(int32_t v) { return _mm512_set1_epi32(v); }
FEWBITS_AVX512_INLINE Ints all_bytes(int v) { return _mm512_set1_epi8(static_cast<char>(v)); }
FEWBITS_AVX512_INLINE Ints both(Ints a, Ints b) { return _mm512_or_si512(a, b); }
FEWBITS_AVX512_INLINE Ints masked(Ints a, Ints b) { return _mm512_and_si512(a, b); }
FEWBITS_AVX512_INLINE Ints flipped(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
template <int kBits>
FEWBITS_AVX512_INLINE Ints right_16(Ints a) {
  return _mm512_srli_epi16(a, kBits);
}
template <int kBits>
FEWBITS_AVX512_INLINE Ints left_16(Ints a) {
  return _mm512_slli_epi16(a, kBits);
}
FEWBITS_AVX512_INLINE Ints spread_16_bytes(const uint8_t* at) { return _mm512_broadcast_i32x4(load_16(at)); }
FEWBITS_AVX512_INLINE Ints looked_up(Ints table_u8, Ints index_u8) { return _mm512_shuffle_epi8(table_u8, index_u8); }
FEWBITS_AVX512_INLINE Ints dpbusd(Ints sum_i32, Ints w_u8, Ints x_i8) { return _mm512_dpbusd_epi32(sum_i32, w_u8, x_i8); }
FEWBITS_AVX512_INLINE __m256i dpbusd_256(__m256i sum_i32, __m256i w_u8, __m256i x_i8) {
  return _mm256_dpbusd_epi32(sum_i32, w_u8, x_i8);
}
FEWBITS_AVX512_INLINE int32_t sum_of_ints(Ints v) { return _mm512_reduce_add_epi32(v); }
FEWBITS_AVX512_INLINE Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
FEWBITS_AVX512_INLINE Floats load_floats(const float* at) { return _mm512_loadu_ps(at); }
FEWBITS_AVX512_INLINE void store_floats(float* at, Floats v) { _mm512_storeu_ps(at, v); }
FEWBITS_AVX512_INLINE Floats all_floats(float v) { return _mm512_set1_ps(v); }
FEWBITS_AVX512_INLINE Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
FEWBITS_AVX512_INLINE Floats times_plus(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
FEWBITS_AVX512_INLINE Floats load_halves(const uint8_t* at) { return _mm512_cvtph_ps(load_32(at)); }

}  // namespace avx512
}  // namespace fewbits
#endif
