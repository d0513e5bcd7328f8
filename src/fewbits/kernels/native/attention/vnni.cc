// The products of attention over a packed cache with AVX-512 and VNNI. attention.h says what each computes.
//
// The factors become integers of two or three 8-bit digits, and VNNI multiplies them by the codes as they are stored: four
// queries take 8 or 12 instructions for 64 codes, where floats (sixteen codes widened, converted, multiplied and added) took 26.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's AVX-512 intrinsics start from uninitialised values
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <bit>
#include <iterator>
#include <limits>

#include "attention/attention.h"
#include "kernels.h"
#include "platform/avx512.h"

#if defined(__x86_64__)
namespace fewbits {
namespace {

// The first n of sixteen lanes, or all.
inline __mmask16 lanes(size_t n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1); }

FEWBITS_AVX512 inline __attribute__((always_inline)) __m512 load_some(const float* at, size_t n) {
  return n >= 16 ? _mm512_loadu_ps(at) : _mm512_maskz_loadu_ps(lanes(n), at);
}

// The factors as integers. The unit of a row is its largest factor over 127 * 256 (Digits 2) or 127 * 65536 (3); its integers
// have 16 or 24 bits, in digits of eight bits with signs, so that VNNI multiplies them with codes, four rows at a time, exactly.
struct Integers {
  alignas(64) int8_t digits[kMostQueries][kMostRows][4];  // [query][rows / 4][digit][4 rows], the least digit first
  float unit[kMostQueries];
};

template <size_t Digits>
FEWBITS_AVX512 void to_integers(const Factors& f, size_t rows, Integers& into) {
  constexpr float kMost = Digits == 2 ? 127.0f * 256 : 127.0f * 65536;
  // adding 128 to each digit makes all bytes positive, carries included; subtracting it again leaves the digits
  const __m512i middle_i32x16 = _mm512_set1_epi32(0x00808080);
  const __m512i by_digit_u8x64 =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));  // of four rows
  for (size_t i = 0; i < f.count; ++i) {
    const float* const a = f.a + i * f.a_stride;
    __m512i largest_i32x16 = _mm512_setzero_si512();  // by their bits: NaN is the largest
    for (size_t row = 0; row < rows; row += 16) {
      const __m512i bits = _mm512_castps_si512(load_some(a + row, rows - row));
      largest_i32x16 = _mm512_max_epi32(largest_i32x16, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    const float largest = std::bit_cast<float>(_mm512_reduce_max_epi32(largest_i32x16));
    into.unit[i] = unit_of(largest, kMost);
    const __m512 by_f32x16 = _mm512_set1_ps(into.unit[i] > 0 ? kMost / largest : 0);
    for (size_t row = 0; row < rows; row += 16) {
      const __m512i integers_i32x16 = _mm512_cvtps_epi32(_mm512_mul_ps(load_some(a + row, rows - row), by_f32x16));
      const __m512i digits_i8x64 = _mm512_xor_si512(_mm512_add_epi32(integers_i32x16, middle_i32x16), middle_i32x16);
      _mm512_store_si512(into.digits[i][row], _mm512_shuffle_epi8(digits_i8x64, by_digit_u8x64));
    }
  }
}

// sum += a . b in each four bytes. With the intrinsic, GCC 12 copies every sum to another register and back, and spills some.
FEWBITS_AVX512 inline __attribute__((always_inline)) void add_products(__m512i& sum_i32x16, __m512i a_u8x64, __m512i b_i8x64) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum_i32x16) : "v"(a_u8x64), "v"(b_i8x64));
}

// 32 columns at a time; AVX2 does the remainder.
template <int Bits, size_t Count>
FEWBITS_AVX512 void tiles_avx512(const Codes& codes, const Factors& f) {
  constexpr size_t kDigits = Bits == 8 ? 3 : 2;  // a cache of four bits is itself far coarser than 16 bits
  if (codes.cols < kNibbleBlock) return kAttentionAvx2.accumulate(codes, f);
  Integers by;
  to_integers<kDigits>(f, codes.rows, by);
  size_t col = 0;
  for (; col + kNibbleBlock <= codes.cols; col += kNibbleBlock) {
    __m512i sum_i32x16[Count][kDigits][2];
    for (auto& of_query : sum_i32x16)
      for (auto& of_digit : of_query) of_digit[0] = of_digit[1] = _mm512_setzero_si512();
    const uint8_t* at = codes.start + kRowsTogether * col * Bits / 8;
    for (size_t row = 0; row < codes.rows; row += kRowsTogether, at += codes.stride) {
      fetch_ahead(at, kRowsTogether * kNibbleBlock * Bits / 8);
      __m512i first_u8x64 = _mm512_loadu_si512(at), second_u8x64;
      if constexpr (Bits == 8) {
        second_u8x64 = _mm512_loadu_si512(at + 64);
      } else {
        second_u8x64 = _mm512_and_si512(_mm512_srli_epi16(first_u8x64, 4), _mm512_set1_epi8(15));
        first_u8x64 = _mm512_and_si512(first_u8x64, _mm512_set1_epi8(15));
      }
      for (size_t i = 0; i < Count; ++i)
        for (size_t d = 0; d < kDigits; ++d) {
          const __m512i digits_i8x64 = _mm512_set1_epi32(load<int32_t>(reinterpret_cast<const uint8_t*>(by.digits[i][row + d])));
          add_products(sum_i32x16[i][d][0], first_u8x64, digits_i8x64);
          add_products(sum_i32x16[i][d][1], second_u8x64, digits_i8x64);
        }
    }
    for (size_t i = 0; i < Count; ++i)
      for (size_t half = 0; half < 2; ++half) {
        float* const out = f.out + i * f.out_stride + col + 16 * half;
        __m512 sum_f32x16 = _mm512_cvtepi32_ps(sum_i32x16[i][kDigits - 1][half]);  // below 2 ** 24: 255 * 128 * 256
        for (size_t d = kDigits - 1; d-- > 0;)
          sum_f32x16 = _mm512_fmadd_ps(sum_f32x16, _mm512_set1_ps(256), _mm512_cvtepi32_ps(sum_i32x16[i][d][half]));
        _mm512_storeu_ps(out, _mm512_fmadd_ps(sum_f32x16, _mm512_set1_ps(by.unit[i]), _mm512_loadu_ps(out)));
      }
  }
  const Codes left{codes.start + kRowsTogether * col * Bits / 8, Bits, codes.stride, codes.rows, codes.cols - col};
  if (left.cols) kAttentionAvx2.accumulate(left, {f.a, f.a_stride, f.count, f.out + col, f.out_stride});
}

void accumulate_avx512(const Codes& codes, const Factors& f) {
  for_count(f.count, [&](auto count) { codes.bits == 4 ? tiles_avx512<4, count>(codes, f) : tiles_avx512<8, count>(codes, f); });
}

FEWBITS_AVX512 void widen_avx512(const uint8_t* halves, size_t n, float* out) {
  for (size_t i = 0; i < n; i += 16) {
    const __m256i sixteen = _mm256_maskz_loadu_epi16(lanes(n - i), halves + 2 * i);
    _mm512_mask_storeu_ps(out + i, lanes(n - i), _mm512_cvtph_ps(sixteen));
  }
}

FEWBITS_AVX512 float scale_and_dot_avx512(const float* a, const float* scale, const float* offset, size_t n, float* scaled) {
  __m512 sum_f32x16 = _mm512_setzero_ps();
  for (size_t i = 0; i < n; i += 16) {
    const __m512 v = load_some(a + i, n - i);
    _mm512_mask_storeu_ps(scaled + i, lanes(n - i), _mm512_mul_ps(v, load_some(scale + i, n - i)));
    sum_f32x16 = _mm512_fmadd_ps(v, load_some(offset + i, n - i), sum_f32x16);
  }
  return _mm512_reduce_add_ps(sum_f32x16);
}

FEWBITS_AVX512 inline __m512 exponential(__m512 x_f32x16) {
  const __mmask16 kept = _mm512_cmp_ps_mask(x_f32x16, _mm512_set1_ps(kLeast), _CMP_NLT_UQ);  // NaN is kept
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x_f32x16, _mm512_set1_ps(kLog2E)), _MM_FROUND_TO_NEAREST_INT);
  const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(kLn2Low), _mm512_fnmadd_ps(n, _mm512_set1_ps(kLn2High), x_f32x16));
  __m512 sum = _mm512_set1_ps(kSeries[0]);
  for (size_t i = 1; i < std::size(kSeries); ++i) sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(kSeries[i]));
  return _mm512_maskz_scalef_ps(kept, sum, n);
}

FEWBITS_AVX512 float exponentials_avx512(float* scores, size_t n, float& largest) {
  const __m512 least_f32x16 = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 largest_f32x16 = least_f32x16, sum_f32x16 = _mm512_setzero_ps();
  for (size_t i = 0; i < n; i += 16)
    largest_f32x16 = _mm512_max_ps(_mm512_mask_loadu_ps(least_f32x16, lanes(n - i), scores + i), largest_f32x16);  // ignores NaN
  largest = _mm512_reduce_max_ps(largest_f32x16);
  for (size_t i = 0; i < n; i += 16) {
    const __mmask16 there = lanes(n - i);
    const __m512 x = _mm512_sub_ps(_mm512_maskz_loadu_ps(there, scores + i), _mm512_set1_ps(largest));
    const __m512 e = _mm512_maskz_mov_ps(there, exponential(x));
    _mm512_mask_storeu_ps(scores + i, there, e);
    sum_f32x16 = _mm512_add_ps(sum_f32x16, e);
  }
  return _mm512_reduce_add_ps(sum_f32x16);
}

void accumulate_floats_by_avx2(const float* values, size_t stride, size_t rows, size_t cols, const Factors& f) {
  kAttentionAvx2.accumulate_floats(values, stride, rows, cols, f);
}

}  // namespace

const AttentionIsa kAttentionAvx512{"avx512",     has_avx512,           accumulate_avx512,  accumulate_floats_by_avx2,
                                    widen_avx512, scale_and_dot_avx512, exponentials_avx512};

}  // namespace fewbits
#endif
