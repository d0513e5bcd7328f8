// Implements halves.h. NaN stays NaN, and values too large for 16 bits become infinity.
#include "formats/halves.h"

#include <bit>
#include <cstring>

#include "platform/avx512.h"

namespace fewbits {
namespace {

// Always inlined, so that each instruction set compiles its own version.
inline __attribute__((always_inline)) void to_bfloat16(const float* x, size_t count, uint16_t* out) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i]);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    out[i] = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
}

uint16_t float16_of(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000)
    return static_cast<uint16_t>(sign | 0x7e00 | (size >> 13 & 0x3ff));  // as the processor's conversion does
  if (size >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);   // 65520 and more
  if (size < 0x38800000)  // below 2^-14: the steps of [0.5, 1) are those of float16's subnormals
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(size) + 0.5f) - 0x3f000000));
  return static_cast<uint16_t>(sign | (((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10)));
}

void float16_scalar(const float* x, size_t count, uint16_t* out) {
  for (size_t i = 0; i < count; ++i) out[i] = float16_of(x[i]);
}
void bfloat16_scalar(const float* x, size_t count, uint16_t* out) { to_bfloat16(x, count, out); }

#if defined(__x86_64__)
FEWBITS_AVX2 void float16_avx2(const float* x, size_t count, uint16_t* out) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
  float16_scalar(x + i, count - i, out + i);
}
FEWBITS_AVX2 void bfloat16_avx2(const float* x, size_t count, uint16_t* out) { to_bfloat16(x, count, out); }
#endif

}  // namespace

ToHalf find_to_half(Half kind, const char* isa) {
#if defined(__x86_64__)
  if (std::strcmp(isa, "scalar") && has_avx2()) return kind == Half::kFloat16 ? float16_avx2 : bfloat16_avx2;
#endif
  (void)isa;
  return kind == Half::kFloat16 ? float16_scalar : bfloat16_scalar;
}

}  // namespace fewbits
