// Floats of 8 bits under a float32 scale per row or for the whole weight: w = scale * fp8. Their 256 values are no small
// integers, so they decode, and multiply through float32.
#include <cmath>
#include <limits>

#include "avx512.h"
#include "kernels.h"
#include "neon.h"

namespace fewbits {
namespace {

using Values = std::array<float, 256>;

Values values_of(int exponent_bits, int mantissa_bits, bool infinite) {
  Values values{};
  const int bias = (1 << (exponent_bits - 1)) - 1, top = (1 << exponent_bits) - 1, last = (1 << mantissa_bits) - 1;
  for (int code = 0; code < 128; ++code) {
    const int exponent = code >> mantissa_bits, mantissa = code & last;
    float value = exponent ? std::ldexp(static_cast<float>(mantissa + last + 1), exponent - bias - mantissa_bits)
                           : std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
    if (exponent == top && infinite)
      value = mantissa ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
    else if (exponent == top && mantissa == last)
      value = std::numeric_limits<float>::quiet_NaN();
    values[code] = value;
    values[code + 128] = -value;
  }
  return values;
}

const Values kE4m3 = values_of(4, 3, false), kE5m2 = values_of(5, 2, true);

template <const Values& values>
void decode_row(const Layout&, RowOf parts, size_t cols, float* out, bool) {
  const float scale = load<float>(parts[1]);
  for (size_t i = 0; i < cols; ++i) out[i] = scale * values[parts[0][i]];
}

#if defined(__x86_64__)
template <const Values& values>
FEWBITS_AVX2 void decode_row_avx2(const Layout& layout, RowOf parts, size_t cols, float* out, bool past) {
  const __m256 scale_f32x8 = _mm256_set1_ps(load<float>(parts[1]));
  size_t i = 0;
  for (; i + 8 <= cols; i += 8) {
    const __m256i code_i32x8 = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load<int64_t>(parts[0] + i)));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(scale_f32x8, _mm256_i32gather_ps(values.data(), code_i32x8, 4)));
  }
  const uint8_t* const rest[] = {parts[0] + i, parts[1]};
  decode_row<values>(layout, rest, cols - i, out + i, past);
}
#elif defined(__aarch64__)
// NEON has no gather, but it converts float16, which has e5m2's exponents, and e4m3's times 2^8.
template <const Values& values, int kMantissa>
void decode_row_neon(const Layout& layout, RowOf parts, size_t cols, float* out, bool past) {
  constexpr uint8_t kLastNumber = kMantissa == 3 ? 0x7e : 0x7c;  // above it, without the sign, are only NaNs
  const float scale = load<float>(parts[1]);
  size_t i = 0;
  for (; i + 8 <= cols; i += 8) {
    const uint8x8_t code_u8x8 = vld1_u8(parts[0] + i), magnitude_u8x8 = vand_u8(code_u8x8, vdup_n_u8(0x7f));
    const uint16x8_t sign_u16x8 = vshll_n_u8(vand_u8(code_u8x8, vdup_n_u8(0x80)), 8);
    const uint16x8_t magnitude_u16x8 = kMantissa == 3 ? vshll_n_u8(magnitude_u8x8, 7) : vshll_n_u8(magnitude_u8x8, 8);
    const uint16x8_t is_nan_u16x8 = vmovl_u8(vcgt_u8(magnitude_u8x8, vdup_n_u8(kLastNumber)));
    const uint16x8_t half_u16x8 = vbslq_u16(vceqzq_u16(is_nan_u16x8), magnitude_u16x8, vdupq_n_u16(0x7e00));
    const float16x8_t half_f16x8 = vreinterpretq_f16_u16(vorrq_u16(half_u16x8, sign_u16x8));
    float32x4_t value_f32x4[2] = {vcvt_f32_f16(vget_low_f16(half_f16x8)), vcvt_high_f32_f16(half_f16x8)};
    for (size_t v = 0; v < 2; ++v) {
      if constexpr (kMantissa == 3) value_f32x4[v] = vmulq_n_f32(value_f32x4[v], 256);
      vst1q_f32(out + i + 4 * v, vmulq_n_f32(value_f32x4[v], scale));
    }
  }
  const uint8_t* const rest[] = {parts[0] + i, parts[1]};
  decode_row<values>(layout, rest, cols - i, out + i, past);
}
#endif

void pack(const Layout&, const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  std::memcpy(parts[0], codes, cols);
  std::memcpy(parts[1], grid[0], 4);
}

template <const Values& values>
struct Kernels {
  Kernel scalar;
#if defined(__x86_64__)
  Kernel avx2, avx512;
#elif defined(__aarch64__)
  static constexpr int kMantissa = &values == &kE4m3 ? 3 : 2;
  Kernel neon;
#endif

  Kernels(const Layout& layout, PackRow pack_row)
      : scalar(layout, "scalar", runs_everywhere, {decode_row<values>, pack_row})
#if defined(__x86_64__)
        ,
        avx2(layout, "avx2", has_avx2, {decode_row_avx2<values>}),
        avx512(layout, "avx512", has_avx512, {decode_row_avx2<values>})
#elif defined(__aarch64__)
        ,
        neon(layout, "neon", runs_everywhere, {decode_row_neon<values, kMantissa>})
#endif
  {
  }
};

constexpr Layout e4m3_channel{"fp8_e4m3_channel", 1, {{"codes", 1}, {"scales", 0, 4}}, {{"scales", 0, 4}}};
constexpr Layout e4m3_tensor{"fp8_e4m3_tensor", 1, {{"codes", 1}, {"scales", 0, 4}}, {{"scales", 0, 4}}};
constexpr Layout e5m2_channel{"fp8_e5m2_channel", 1, {{"codes", 1}, {"scales", 0, 4}}, {{"scales", 0, 4}}};
constexpr Layout e5m2_tensor{"fp8_e5m2_tensor", 1, {{"codes", 1}, {"scales", 0, 4}}, {{"scales", 0, 4}}};
Kernels<kE4m3> e4m3_by_channel{e4m3_channel, pack}, e4m3_for_all{e4m3_tensor, nullptr};
Kernels<kE5m2> e5m2_by_channel{e5m2_channel, pack}, e5m2_for_all{e5m2_tensor, nullptr};

}  // namespace
}  // namespace fewbits
