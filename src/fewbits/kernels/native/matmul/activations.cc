// Rows of float32 to int8 codes, scales and sums. activations.h says what they are.
//
// 4 bytes read and 1.25 written per value. Bound by the divisions, five cycles for eight of them: a product with 1 / d would be
// faster, but rounds twice, and a value between two codes would not always go to the nearer one. Compared with a matmul the time
// is negligible.
//
// The largest magnitude is found by comparing the values' bits as integers: NaN is then the largest of all, where a maximum of
// floats would miss it.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's AVX-512 intrinsics start from uninitialised values
#endif

#include "matmul/activations.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "platform/avx512.h"
#include "platform/neon.h"
#include "platform/threads.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))  // into functions of another ISA, because a call would cost more

namespace fewbits {
namespace {

constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinity = 0x7f800000;
constexpr float kLargest = 127;

// From the bits of a block's largest magnitude.
inline float scale_of(int32_t largest) {
  return largest < kInfinity ? std::bit_cast<float>(largest) / kLargest : std::numeric_limits<float>::quiet_NaN();
}

inline bool has_codes(float scale) { return scale > 0; }  // neither 0 nor NaN

// Nearest integer, halves to even, for |x| < 2 ** 22: the sum has no bits for a fraction.
inline int32_t rounded(float x) { return static_cast<int32_t>((x + 0x1.8p23f) - 0x1.8p23f); }

void quantize_block_scalar(const float* x, size_t cols, int8_t* q, float* scale, int32_t* sums) {
  int32_t largest = 0;
  for (size_t i = 0; i < cols; ++i) largest = std::max(largest, std::bit_cast<int32_t>(x[i]) & kMagnitude);
  *scale = scale_of(largest);
  sums[0] = sums[1] = 0;
  std::memset(q, 0, kActivationBlock);
  if (!has_codes(*scale)) return;
  for (size_t i = 0; i < cols; ++i) {
    const int32_t code =
        rounded(std::clamp(x[i] / *scale, -kLargest, kLargest));  // quotients exceed 127 if the scale is subnormal
    q[i] = static_cast<int8_t>(code);
    sums[i / kActivationSum] += code;
  }
}

using QuantizeBlock = void (*)(const float* x, int8_t* q, float* scale, int32_t* sums);

// Whole blocks by Whole, an incomplete last one by the scalar code.
template <QuantizeBlock Whole>
ALWAYS_INLINE void quantize_row(const float* x, size_t cols, int8_t* q, float* scale, int32_t* sums) {
  size_t col = 0;
  for (; col + kActivationBlock <= cols; col += kActivationBlock)
    Whole(x + col, q + col, scale + col / kActivationBlock, sums + col / kActivationSum);
  if (col < cols)
    quantize_block_scalar(x + col, cols - col, q + col, scale + col / kActivationBlock, sums + col / kActivationSum);
}

inline void whole_block_scalar(const float* x, int8_t* q, float* scale, int32_t* sums) {
  quantize_block_scalar(x, kActivationBlock, q, scale, sums);
}

void quantize_row_scalar(const float* x, size_t cols, int8_t* q, float* scale, int32_t* sums) {
  quantize_row<whole_block_scalar>(x, cols, q, scale, sums);
}

#if defined(__x86_64__)
FEWBITS_AVX2 ALWAYS_INLINE int32_t largest_of(__m256i v_i32x8) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v_i32x8), _mm256_extracti128_si256(v_i32x8, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0b01'00'11'10));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0b10'11'00'01));
  return _mm_cvtsi128_si32(m);
}

// The sums of the two halves of 32 codes.
FEWBITS_AVX2 ALWAYS_INLINE void store_sums(__m256i q_i8x32, int32_t* sums) {
  const __m256i pairs_i16x16 =
      _mm256_maddubs_epi16(_mm256_set1_epi8(1), q_i8x32);  // 1 is the unsigned operand: nothing saturates
  const __m256i fours_i32x8 = _mm256_madd_epi16(pairs_i16x16, _mm256_set1_epi16(1));
  const __m128i low = _mm256_castsi256_si128(fours_i32x8), high = _mm256_extracti128_si256(fours_i32x8, 1);
  const __m128i eights = _mm_hadd_epi32(low, high);  // low, low, high, high
  _mm_storel_epi64(reinterpret_cast<__m128i*>(sums), _mm_hadd_epi32(eights, eights));
}

FEWBITS_AVX2 inline __m256i codes_avx2(__m256 x_f32x8, __m256 scale_f32x8) {
  const __m256 limit = _mm256_set1_ps(kLargest), least = _mm256_set1_ps(-kLargest);
  return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(_mm256_div_ps(x_f32x8, scale_f32x8), least), limit));
}

FEWBITS_AVX2 inline void whole_block_avx2(const float* x, int8_t* q, float* scale, int32_t* sums) {
  const __m256 a = _mm256_loadu_ps(x), b = _mm256_loadu_ps(x + 8), c = _mm256_loadu_ps(x + 16), d = _mm256_loadu_ps(x + 24);
  const __m256i magnitude = _mm256_set1_epi32(kMagnitude);
  const auto bits = [&](__m256 v) FEWBITS_AVX2 { return _mm256_and_si256(_mm256_castps_si256(v), magnitude); };
  *scale = scale_of(largest_of(_mm256_max_epi32(_mm256_max_epi32(bits(a), bits(b)), _mm256_max_epi32(bits(c), bits(d)))));
  __m256i codes_i8x32 = _mm256_setzero_si256();
  if (has_codes(*scale)) {
    const __m256 by = _mm256_set1_ps(*scale);
    const __m256i ab = _mm256_packs_epi32(codes_avx2(a, by), codes_avx2(b, by));
    const __m256i cd = _mm256_packs_epi32(codes_avx2(c, by), codes_avx2(d, by));
    // packs work within halves: the fours are in the order a b c d, a b c d
    codes_i8x32 = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), codes_i8x32);
  store_sums(codes_i8x32, sums);
}

FEWBITS_AVX2 void quantize_row_avx2(const float* x, size_t cols, int8_t* q, float* scale, int32_t* sums) {
  quantize_row<whole_block_avx2>(x, cols, q, scale, sums);
}

FEWBITS_AVX512 inline __m128i codes_avx512(__m512 x_f32x16, __m512 scale_f32x16) {
  const __m512 limit = _mm512_set1_ps(kLargest), least = _mm512_set1_ps(-kLargest);
  const __m512 codes = _mm512_min_ps(_mm512_max_ps(_mm512_div_ps(x_f32x16, scale_f32x16), least), limit);
  return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(codes));
}

FEWBITS_AVX512 inline void whole_block_avx512(const float* x, int8_t* q, float* scale, int32_t* sums) {
  const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
  const __m512i magnitude = _mm512_set1_epi32(kMagnitude);
  const __m512i largest_i32x16 =
      _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), magnitude), _mm512_and_si512(_mm512_castps_si512(b), magnitude));
  *scale = scale_of(
      largest_of(_mm256_max_epi32(_mm512_castsi512_si256(largest_i32x16), _mm512_extracti64x4_epi64(largest_i32x16, 1))));
  __m256i codes_i8x32 = _mm256_setzero_si256();
  if (has_codes(*scale)) {
    const __m512 by = _mm512_set1_ps(*scale);
    codes_i8x32 = _mm256_inserti128_si256(_mm256_castsi128_si256(codes_avx512(a, by)), codes_avx512(b, by), 1);
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), codes_i8x32);
  store_sums(codes_i8x32, sums);
}

FEWBITS_AVX512 void quantize_row_avx512(const float* x, size_t cols, int8_t* q, float* scale, int32_t* sums) {
  quantize_row<whole_block_avx512>(x, cols, q, scale, sums);
}
#elif defined(__aarch64__)
FEWBITS_NEON_INLINE int16x4_t codes_neon(float32x4_t x_f32x4, float32x4_t scale_f32x4) {
  const float32x4_t code_f32x4 = vdivq_f32(x_f32x4, scale_f32x4);
  return vmovn_s32(vcvtnq_s32_f32(vminq_f32(vmaxq_f32(code_f32x4, vdupq_n_f32(-kLargest)), vdupq_n_f32(kLargest))));
}

inline void whole_block_neon(const float* x, int8_t* q, float* scale, int32_t* sums) {
  float32x4_t x_f32x4[8];
  int32x4_t largest_i32x4 = vdupq_n_s32(0);
  for (size_t i = 0; i < 8; ++i) {
    x_f32x4[i] = vld1q_f32(x + 4 * i);
    largest_i32x4 = vmaxq_s32(largest_i32x4, vandq_s32(vreinterpretq_s32_f32(x_f32x4[i]), vdupq_n_s32(kMagnitude)));
  }
  *scale = scale_of(vmaxvq_s32(largest_i32x4));
  const float32x4_t by_f32x4 = vdupq_n_f32(*scale);
  for (size_t half = 0; half < 2; ++half) {
    int8x16_t codes_i8x16 = vdupq_n_s8(0);
    if (has_codes(*scale)) {
      int16x8_t eight_i16x8[2];
      for (size_t i = 0; i < 2; ++i) {
        const size_t first = 4 * half + 2 * i;
        eight_i16x8[i] = vcombine_s16(codes_neon(x_f32x4[first], by_f32x4), codes_neon(x_f32x4[first + 1], by_f32x4));
      }
      codes_i8x16 = vcombine_s8(vmovn_s16(eight_i16x8[0]), vmovn_s16(eight_i16x8[1]));
    }
    vst1q_s8(q + 16 * half, codes_i8x16);
    sums[half] = vaddlvq_s8(codes_i8x16);
  }
}

void quantize_row_neon(const float* x, size_t cols, int8_t* q, float* scale, int32_t* sums) {
  quantize_row<whole_block_neon>(x, cols, q, scale, sums);
}
#endif

struct Path {
  const char* isa;
  bool (*runs_here)();
  QuantizeRow quantize_row;
};

const Path kPaths[] = {
#if defined(__x86_64__)
    {"avx512", has_avx512, quantize_row_avx512},
    {"avx", has_avx2, quantize_row_avx2},
#elif defined(__aarch64__)
    {"neon", runs_everywhere, quantize_row_neon},
#endif
    {"", runs_everywhere, quantize_row_scalar},
};

}  // namespace

QuantizeRow find_quantize_row(const char* isa) {
  for (const Path& path : kPaths)
    if (std::strncmp(isa, path.isa, std::strlen(path.isa)) == 0) {
      if (path.runs_here()) return path.quantize_row;
      throw std::invalid_argument(std::string("activations cannot be quantized by ") + isa + ", this processor has none");
    }
  return quantize_row_scalar;
}

void quantize_rows(const char* isa, const float* x, size_t rows, size_t cols, QuantizedRows& into, int threads) {
  constexpr size_t kWorthAShare = 1 << 14;  // values: about 5 us, a few times as long as handing over a share
  const QuantizeRow quantize = find_quantize_row(isa);
  const size_t padded = padded_columns(cols), blocks = padded / kActivationBlock, parts = padded / kActivationSum;
  into.rows = rows;
  into.cols = cols;
  into.padded = padded;
  const size_t shares = shares_of(threads, std::min(rows, rows * cols / kWorthAShare));
  run_shares(shares, [&](size_t i) {
    for (size_t row = rows * i / shares; row < rows * (i + 1) / shares; ++row)
      quantize(x + row * cols, cols, into.q + row * padded, into.scale + row * blocks, into.sums + row * parts);
  });
}

}  // namespace fewbits
