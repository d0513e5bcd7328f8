// The products and sums of attention over a packed cache: scalar and AVX2. attention.h says what each computes.
//
// AVX2: the factors become integers of 16 bits and vpmaddwd multiplies them with the codes, two rows at a time. A tile is two
// vectors of eight columns for up to four queries, eight sums in registers: 18 instructions for 32 codes and four queries. As
// floats (shift, mask, convert, multiply-add) it was 26, which took 1.2 (8 bits) to 1.3 times as long (4 bits).
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

#include "attention/attention.h"
#include "kernels.h"
#include "platform/avx2.h"

namespace fewbits {
namespace {

float code_at(const Codes& codes, size_t row, size_t col) {
  const uint8_t* const at = codes.start + row / kRowsTogether * codes.stride + row % kRowsTogether;
  if (codes.bits == 8) return at[kRowsTogether * col];
  const size_t block = col / kNibbleBlock * kNibbleBlock, half = (std::min(kNibbleBlock, codes.cols - block) + 1) / 2,
               i = col - block;
  const uint8_t both = at[kRowsTogether * (block / 2 + i % half)];
  return i < half ? both & 15 : both >> 4;
}

void accumulate_from(size_t first, const Codes& codes, const Factors& f) {
  for (size_t row = 0; row < codes.rows; ++row)
    for (size_t col = first; col < codes.cols; ++col) {
      const float code = code_at(codes, row, col);
      for (size_t i = 0; i < f.count; ++i) f.out[i * f.out_stride + col] += f.a[i * f.a_stride + row] * code;
    }
}

void accumulate_scalar(const Codes& codes, const Factors& f) { accumulate_from(0, codes, f); }

void accumulate_floats_scalar(const float* values, size_t stride, size_t rows, size_t cols, const Factors& f) {
  for (size_t row = 0; row < rows; ++row)
    for (size_t i = 0; i < f.count; ++i)
      for (size_t col = 0; col < cols; ++col)
        f.out[i * f.out_stride + col] += f.a[i * f.a_stride + row] * values[row * stride + col];
}

void widen_scalar(const uint8_t* halves, size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = float16_at(halves + 2 * i);
}

float scale_and_dot_scalar(const float* a, const float* scale, const float* offset, size_t n, float* scaled) {
  float sum = 0;
  for (size_t i = 0; i < n; ++i) {
    scaled[i] = a[i] * scale[i];
    sum += a[i] * offset[i];
  }
  return sum;
}

float exponentials_below(float* scores, size_t n, float largest) {
  float sum = 0;
  for (size_t i = 0; i < n; ++i) {
    const float x = scores[i] - largest;
    scores[i] = x < kLeast ? 0 : std::exp(x);
    sum += scores[i];
  }
  return sum;
}

float exponentials_scalar(float* scores, size_t n, float& largest) {
  largest = -std::numeric_limits<float>::infinity();
  for (size_t i = 0; i < n; ++i) largest = std::max(largest, scores[i]);
  return exponentials_below(scores, n, largest);
}

#if defined(__x86_64__)
// The factors as 16-bit integers: the unit of a row is its largest factor over 32767. Two rows are side by side, as vpmaddwd
// takes them: of four rows the first and third, then the second and fourth.
struct Integers {
  alignas(32) int16_t pairs[kMostQueries][kMostRows];
  float unit[kMostQueries];
};

FEWBITS_AVX2 void to_integers(const Factors& f, size_t rows, Integers& into) {
  const __m256i in_pairs_u8x32 = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 0, 1, 4, 5, 2, 3, 6, 7));
  for (size_t i = 0; i < f.count; ++i) {
    const float* const a = f.a + i * f.a_stride;
    const auto eight = [&](size_t row) __attribute__((target("avx2,fma,f16c"))) {
      if (row + 8 <= rows) return _mm256_loadu_ps(a + row);
      alignas(32) float some[8] = {};
      std::copy(a + row, a + rows, some);
      return _mm256_load_ps(some);
    };
    __m256i largest_i32x8 = _mm256_setzero_si256();  // by their bits: NaN is the largest
    for (size_t row = 0; row < rows; row += 8)
      largest_i32x8 =
          _mm256_max_epi32(largest_i32x8, _mm256_and_si256(_mm256_castps_si256(eight(row)), _mm256_set1_epi32(0x7fffffff)));
    alignas(32) int32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), largest_i32x8);
    const float largest = std::bit_cast<float>(*std::max_element(lanes, lanes + 8));
    into.unit[i] = unit_of(largest, 32767);
    const __m256 by_f32x8 = _mm256_set1_ps(into.unit[i] > 0 ? 32767 / largest : 0);
    for (size_t row = 0; row < rows; row += 8) {
      const __m256i integers_i32x8 = _mm256_cvtps_epi32(_mm256_mul_ps(eight(row), by_f32x8));
      const __m256i twice_i16x16 = _mm256_shuffle_epi8(_mm256_packs_epi32(integers_i32x8, integers_i32x8), in_pairs_u8x32);
      const __m256i once_i16x8 = _mm256_permute4x64_epi64(twice_i16x16, 0b10'00);
      _mm_store_si128(reinterpret_cast<__m128i*>(into.pairs[i] + row), _mm256_castsi256_si128(once_i16x8));
    }
  }
}

// Sixteen columns; the second eight are `apart` from the first.
template <int Bits, size_t Count>
FEWBITS_AVX2 void tile_avx2(const Codes& codes, size_t byte, const Integers& by, const Factors& f, size_t col, size_t apart) {
  const __m256i mask_i16x16 = _mm256_set1_epi16((1 << Bits) - 1);
  __m256i sum_i32x8[Count][2];  // of 256 rows at most: 255 * 32767 * 256 is below 2 ** 31
  for (auto& of_query : sum_i32x8) of_query[0] = of_query[1] = _mm256_setzero_si256();
  const uint8_t* at = codes.start + byte;
  for (size_t row = 0; row < codes.rows; row += kRowsTogether, at += codes.stride) {
    if (byte % 64 == 0) fetch_ahead(at, 64);
    const __m256i first = load_32(at), second = Bits == 8 ? load_32(at + 32) : _mm256_srli_epi16(first, 4);
    const __m256i even[2] = {_mm256_and_si256(first, mask_i16x16), _mm256_and_si256(second, mask_i16x16)};
    const __m256i odd[2] = {_mm256_and_si256(_mm256_srli_epi16(first, 8), mask_i16x16), _mm256_srli_epi16(second, 8)};
    for (size_t i = 0; i < Count; ++i) {
      const auto* const pairs = reinterpret_cast<const uint8_t*>(by.pairs[i] + row);
      const __m256i by_even = _mm256_set1_epi32(load<int32_t>(pairs)), by_odd = _mm256_set1_epi32(load<int32_t>(pairs + 4));
      for (size_t half = 0; half < 2; ++half) {
        sum_i32x8[i][half] = _mm256_add_epi32(sum_i32x8[i][half], _mm256_madd_epi16(even[half], by_even));
        sum_i32x8[i][half] = _mm256_add_epi32(sum_i32x8[i][half], _mm256_madd_epi16(odd[half], by_odd));
      }
    }
  }
  for (size_t i = 0; i < Count; ++i)
    for (size_t half = 0; half < 2; ++half) {
      float* const out = f.out + i * f.out_stride + col + half * apart;
      const __m256 sum_f32x8 = _mm256_cvtepi32_ps(sum_i32x8[i][half]);
      _mm256_storeu_ps(out, _mm256_fmadd_ps(sum_f32x8, _mm256_set1_ps(by.unit[i]), _mm256_loadu_ps(out)));
    }
}

template <int Bits, size_t Count>
FEWBITS_AVX2 void tiles_avx2(const Codes& codes, const Factors& f) {
  Integers by;
  to_integers(f, codes.rows, by);
  size_t col = 0;
  if constexpr (Bits == 4) {
    for (; col + kNibbleBlock <= codes.cols; col += kNibbleBlock)
      for (size_t eight = 0; eight < 16; eight += 8)
        tile_avx2<Bits, Count>(codes, kRowsTogether * (col / 2 + eight), by, f, col + eight, 16);
    if (codes.cols - col == 16) {
      tile_avx2<Bits, Count>(codes, kRowsTogether * col / 2, by, f, col, 8);
      col += 16;
    }
  } else {
    for (; col + 16 <= codes.cols; col += 16) tile_avx2<Bits, Count>(codes, kRowsTogether * col, by, f, col, 8);
  }
  if (col < codes.cols) accumulate_from(col, codes, f);
}

template <size_t Count>
FEWBITS_AVX2 void floats_avx2(const float* values, size_t stride, size_t rows, size_t cols, const Factors& f) {
  size_t col = 0;
  for (; col + 16 <= cols; col += 16) {
    __m256 sum[Count][2];
    for (size_t i = 0; i < Count; ++i)
      for (size_t half = 0; half < 2; ++half) sum[i][half] = _mm256_loadu_ps(f.out + i * f.out_stride + col + 8 * half);
    for (size_t row = 0; row < rows; ++row) {
      const __m256 v[2] = {_mm256_loadu_ps(values + row * stride + col), _mm256_loadu_ps(values + row * stride + col + 8)};
      for (size_t i = 0; i < Count; ++i) {
        const __m256 by = _mm256_broadcast_ss(f.a + i * f.a_stride + row);
        for (size_t half = 0; half < 2; ++half) sum[i][half] = _mm256_fmadd_ps(by, v[half], sum[i][half]);
      }
    }
    for (size_t i = 0; i < Count; ++i)
      for (size_t half = 0; half < 2; ++half) _mm256_storeu_ps(f.out + i * f.out_stride + col + 8 * half, sum[i][half]);
  }
  const Factors left{f.a, f.a_stride, f.count, f.out + col, f.out_stride};
  accumulate_floats_scalar(values + col, stride, rows, cols - col, left);
}

void accumulate_floats_avx2(const float* values, size_t stride, size_t rows, size_t cols, const Factors& f) {
  for_count(f.count, [&](auto count) { floats_avx2<count>(values, stride, rows, cols, f); });
}

FEWBITS_AVX2 void widen_avx2(const uint8_t* halves, size_t n, float* out) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(load_16(halves + 2 * i)));
  widen_scalar(halves + 2 * i, n - i, out + i);
}

FEWBITS_AVX2 inline float sum_of(__m256 v_f32x8) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v_f32x8), _mm256_extractf128_ps(v_f32x8, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

FEWBITS_AVX2 float scale_and_dot_avx2(const float* a, const float* scale, const float* offset, size_t n, float* scaled) {
  __m256 sum_f32x8 = _mm256_setzero_ps();
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 v = _mm256_loadu_ps(a + i);
    _mm256_storeu_ps(scaled + i, _mm256_mul_ps(v, _mm256_loadu_ps(scale + i)));
    sum_f32x8 = _mm256_fmadd_ps(v, _mm256_loadu_ps(offset + i), sum_f32x8);
  }
  return sum_of(sum_f32x8) + scale_and_dot_scalar(a + i, scale + i, offset + i, n - i, scaled + i);
}

FEWBITS_AVX2 inline __m256 exponential(__m256 x_f32x8) {
  const __m256 least = _mm256_set1_ps(kLeast);
  const __m256 kept = _mm256_cmp_ps(x_f32x8, least, _CMP_NLT_UQ);  // NaN is kept
  const __m256 x = _mm256_max_ps(least, x_f32x8);                  // in this order of operands, NaN stays
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(kLog2E)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(kLn2Low), _mm256_fnmadd_ps(n, _mm256_set1_ps(kLn2High), x));
  __m256 sum = _mm256_set1_ps(kSeries[0]);
  for (size_t i = 1; i < std::size(kSeries); ++i) sum = _mm256_fmadd_ps(sum, r, _mm256_set1_ps(kSeries[i]));
  const __m256i exponent_i32x8 = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_and_ps(_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum), exponent_i32x8)), kept);
}

FEWBITS_AVX2 float exponentials_avx2(float* scores, size_t n, float& largest) {
  __m256 largest_f32x8 = _mm256_set1_ps(-std::numeric_limits<float>::infinity()), sum_f32x8 = _mm256_setzero_ps();
  size_t i = 0;
  for (; i + 8 <= n; i += 8) largest_f32x8 = _mm256_max_ps(_mm256_loadu_ps(scores + i), largest_f32x8);  // ignores NaN
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, largest_f32x8);
  largest = *std::max_element(lanes, lanes + 8);
  for (; i < n; ++i) largest = std::max(largest, scores[i]);
  const __m256 by = _mm256_set1_ps(largest);
  for (i = 0; i + 8 <= n; i += 8) {
    const __m256 e = exponential(_mm256_sub_ps(_mm256_loadu_ps(scores + i), by));
    _mm256_storeu_ps(scores + i, e);
    sum_f32x8 = _mm256_add_ps(sum_f32x8, e);
  }
  return sum_of(sum_f32x8) + exponentials_below(scores + i, n - i, largest);
}

void accumulate_avx2(const Codes& codes, const Factors& f) {
  for_count(f.count, [&](auto count) { codes.bits == 4 ? tiles_avx2<4, count>(codes, f) : tiles_avx2<8, count>(codes, f); });
}
#endif

}  // namespace

#if defined(__x86_64__)
const AttentionIsa kAttentionAvx2{"avx2",     has_avx2,           accumulate_avx2,  accumulate_floats_avx2,
                                  widen_avx2, scale_and_dot_avx2, exponentials_avx2};
#endif
const AttentionIsa kAttentionScalar{"scalar",     runs_everywhere,      accumulate_scalar,  accumulate_floats_scalar,
                                    widen_scalar, scale_and_dot_scalar, exponentials_scalar};

}  // namespace fewbits
