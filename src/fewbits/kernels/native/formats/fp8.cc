// 8-bit floats under a float32 scale per row or for the whole weight: w = scale * fp8. Their 256 values are no small integers,
// so they are multiplied as float32.
//
// Processors convert float16, whose upper byte is an e5m2; an e4m3 moved to the same place gives its value times 2^-8. Only the
// NaN of e4m3 (its last code) would become a number, so it is handled separately.
#include <cmath>
#include <limits>

#include "kernels.h"
#include "platform/avx512.h"
#include "platform/avxvnni.h"
#include "platform/neon.h"

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
constexpr bool kIsE4m3 = &values == &kE4m3;
template <const Values& values>
constexpr float kFromHalf = kIsE4m3<values> ? 256.0f : 1.0f;

// Turns sign-extended codes into float16.
template <const Values& values>
FEWBITS_AVX2_INLINE __m256i halves_of(__m256i code_i16x16) {
  if constexpr (!kIsE4m3<values>) return _mm256_slli_epi16(code_i16x16, 8);
  return _mm256_and_si256(_mm256_slli_epi16(code_i16x16, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
}

// The same bits as decode_row, including the NaNs of its table.
template <const Values& values>
FEWBITS_AVX2 void decode_row_avx2(const Layout& layout, RowOf parts, size_t cols, float* out, bool past) {
  const __m256i last_number_i16x16 = _mm256_set1_epi16(kIsE4m3<values> ? 0x7e : 0x7c);
  const __m256 scale_f32x8 = _mm256_set1_ps(load<float>(parts[1])), from_half_f32x8 = _mm256_set1_ps(kFromHalf<values>);
  size_t i = 0;
  for (; i + 16 <= cols; i += 16) {
    const __m256i code_i16x16 = _mm256_cvtepi8_epi16(load_16(parts[0] + i));
    const __m256i sign_i16x16 = _mm256_and_si256(code_i16x16, _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
    const __m256i is_nan_i16x16 = _mm256_cmpgt_epi16(_mm256_and_si256(code_i16x16, _mm256_set1_epi16(0x7f)), last_number_i16x16);
    const __m256i nan_i16x16 = _mm256_or_si256(sign_i16x16, _mm256_set1_epi16(0x7e00));
    const __m256i half_i16x16 = _mm256_blendv_epi8(halves_of<values>(code_i16x16), nan_i16x16, is_nan_i16x16);
    const __m256 low_f32x8 = _mm256_cvtph_ps(_mm256_castsi256_si128(half_i16x16));
    const __m256 high_f32x8 = _mm256_cvtph_ps(_mm256_extracti128_si256(half_i16x16, 1));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(scale_f32x8, _mm256_mul_ps(low_f32x8, from_half_f32x8)));
    _mm256_storeu_ps(out + i + 8, _mm256_mul_ps(scale_f32x8, _mm256_mul_ps(high_f32x8, from_half_f32x8)));
  }
  const uint8_t* const rest[] = {parts[0] + i, parts[1]};
  decode_row<values>(layout, rest, cols - i, out + i, past);
}

// Sums of columns from `from` on, before the scale.
template <const Values& values>
float sum_of_rest(const uint8_t* codes, const float* x, size_t from, size_t cols) {
  float sum = 0;
  for (size_t i = from; i < cols; ++i) sum += values[codes[i]] * x[i];
  return sum;
}

constexpr size_t kAheadOf = 1024;  // bytes to prefetch ahead of each stream

template <const Values& values, size_t kCount>
FEWBITS_AVX2_INLINE void dot_avx2(const RowOf* parts, const float* x, size_t cols, float* out) {
  const __m256i last_i8x32 = _mm256_set1_epi8(0x7f);
  __m256 sum_f32x8[kCount][2] = {};
  __m256i nan_i8x32[kCount] = {};
  size_t i = 0;
  for (; i + 32 <= cols; i += 32) {
    __m256 x_f32x8[4];
    for (size_t k = 0; k < 4; ++k) x_f32x8[k] = _mm256_loadu_ps(x + i + 8 * k);
#pragma GCC unroll 4
    for (size_t r = 0; r < kCount; ++r) {
      const uint8_t* const codes = parts[r][0] + i;
      _mm_prefetch(reinterpret_cast<const char*>(codes) + kAheadOf, _MM_HINT_T0);
      if constexpr (kIsE4m3<values>)
        nan_i8x32[r] = _mm256_or_si256(nan_i8x32[r], _mm256_cmpeq_epi8(_mm256_and_si256(load_32(codes), last_i8x32), last_i8x32));
#pragma GCC unroll 2
      for (size_t k = 0; k < 2; ++k) {
        const __m256i half_i16x16 = halves_of<values>(_mm256_cvtepi8_epi16(load_16(codes + 16 * k)));
        const __m256 low_f32x8 = _mm256_cvtph_ps(_mm256_castsi256_si128(half_i16x16));
        const __m256 high_f32x8 = _mm256_cvtph_ps(_mm256_extracti128_si256(half_i16x16, 1));
        sum_f32x8[r][0] = _mm256_fmadd_ps(low_f32x8, x_f32x8[2 * k], sum_f32x8[r][0]);
        sum_f32x8[r][1] = _mm256_fmadd_ps(high_f32x8, x_f32x8[2 * k + 1], sum_f32x8[r][1]);
      }
    }
  }
  for (size_t r = 0; r < kCount; ++r) {
    const bool has_nan = kIsE4m3<values> && _mm256_movemask_epi8(nan_i8x32[r]) != 0;
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, _mm256_add_ps(sum_f32x8[r][0], sum_f32x8[r][1]));
    float sum = 0;
    for (const float lane : lanes) sum += lane;
    sum = has_nan ? std::numeric_limits<float>::quiet_NaN() : sum * kFromHalf<values>;
    out[r] = load<float>(parts[r][1]) * (sum + sum_of_rest<values>(parts[r][0], x, i, cols));
  }
}

template <const Values& values, size_t kCount>
FEWBITS_AVX512_INLINE void dot_avx512(const RowOf* parts, const float* x, size_t cols, float* out) {
  const __m512i last_i8x64 = _mm512_set1_epi8(0x7f);
  __m512 sum_f32x16[kCount][2] = {};
  __mmask64 nan[kCount] = {};
  size_t i = 0;
  for (; i + 64 <= cols; i += 64) {
    __m512 x_f32x16[4];
    for (size_t k = 0; k < 4; ++k) x_f32x16[k] = _mm512_loadu_ps(x + i + 16 * k);
#pragma GCC unroll 4
    for (size_t r = 0; r < kCount; ++r) {
      const uint8_t* const codes = parts[r][0] + i;
      _mm_prefetch(reinterpret_cast<const char*>(codes) + kAheadOf, _MM_HINT_T0);
      if constexpr (kIsE4m3<values>)
        nan[r] |= _mm512_cmpeq_epi8_mask(_mm512_and_si512(_mm512_loadu_si512(codes), last_i8x64), last_i8x64);
#pragma GCC unroll 2
      for (size_t k = 0; k < 2; ++k) {
        const __m512i code_i16x32 = _mm512_cvtepi8_epi16(load_32(codes + 32 * k));
        __m512i half_i16x32;
        if constexpr (kIsE4m3<values>)
          half_i16x32 = _mm512_and_si512(_mm512_slli_epi16(code_i16x32, 7), _mm512_set1_epi16(static_cast<int16_t>(0xbfff)));
        else
          half_i16x32 = _mm512_slli_epi16(code_i16x32, 8);
        const __m512 low_f32x16 = _mm512_cvtph_ps(_mm512_castsi512_si256(half_i16x32));
        const __m512 high_f32x16 = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half_i16x32, 1));
        sum_f32x16[r][0] = _mm512_fmadd_ps(low_f32x16, x_f32x16[2 * k], sum_f32x16[r][0]);
        sum_f32x16[r][1] = _mm512_fmadd_ps(high_f32x16, x_f32x16[2 * k + 1], sum_f32x16[r][1]);
      }
    }
  }
  for (size_t r = 0; r < kCount; ++r) {
    float sum = _mm512_reduce_add_ps(_mm512_add_ps(sum_f32x16[r][0], sum_f32x16[r][1]));
    sum = nan[r] ? std::numeric_limits<float>::quiet_NaN() : sum * kFromHalf<values>;
    out[r] = load<float>(parts[r][1]) * (sum + sum_of_rest<values>(parts[r][0], x, i, cols));
  }
}

template <const Values& values>
FEWBITS_AVX2 void dot_rows_avx2(const Layout&, const RowOf* parts, size_t count, const float* x, size_t cols, float* out) {
  count == 4 ? dot_avx2<values, 4>(parts, x, cols, out) : dot_avx2<values, 1>(parts, x, cols, out);
}

template <const Values& values>
FEWBITS_AVX512 void dot_rows_avx512(const Layout&, const RowOf* parts, size_t count, const float* x, size_t cols, float* out) {
  count == 4 ? dot_avx512<values, 4>(parts, x, cols, out) : dot_avx512<values, 1>(parts, x, cols, out);
}

constexpr Functions with_dot(DecodeRow decode_row, DotFloats dot) {
  Functions functions{decode_row};
  functions.dot_floats = dot;
  return functions;
}
#elif defined(__aarch64__)
// NEON has no gather, but it converts float16, which e5m2 is the upper byte of, and e4m3 too but for a factor of 2^8.
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
  Kernel avx2, avxvnni, avx512;
#elif defined(__aarch64__)
  static constexpr int kMantissa = &values == &kE4m3 ? 3 : 2;
  Kernel neon;
#endif

  Kernels(const Layout& layout, PackRow pack_row)
      : scalar(layout, "scalar", runs_everywhere, {decode_row<values>, pack_row})
#if defined(__x86_64__)
        ,
        avx2(layout, "avx2", has_avx2, with_dot(decode_row_avx2<values>, dot_rows_avx2<values>)),
        avxvnni(layout, "avxvnni", has_avxvnni, avx2.of),  // these products are of floats
        avx512(layout, "avx512", has_avx512, with_dot(decode_row_avx2<values>, dot_rows_avx512<values>))
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
