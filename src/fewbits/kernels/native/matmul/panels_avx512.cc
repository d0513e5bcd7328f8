// panels.h with VNNI: vpdpbusd multiplies four unsigned bytes by four signed ones and adds them to a 32-bit lane, exactly.
//
// A tile is 32 weights (two registers of 16 lanes) by 6 rows of activations: 12 integer and 12 float sums stay in registers. Per
// block of 32 columns that is 96 products, then a conversion, a product and a sum for each of the 12: the products take 8 parts
// in 11 of the multiplier's time.
#include <algorithm>

#include "matmul/panels.h"
#include "platform/avx512.h"

#if defined(__x86_64__)
namespace fewbits {
namespace {

template <int kRows, bool kBy16, bool kOffsets>
FEWBITS_AVX512 void multiply(const Panel& panel, const ActivationTile& x, size_t blocks, bool add, float* out) {
  constexpr size_t kUnits = kBy16 ? 2 : 1, kSteps = 8 / kUnits;
  __m512 total_f32x16[kRows][2];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < 2; ++v) total_f32x16[r][v] = add ? _mm512_loadu_ps(out + r * kPanelRows + 16 * v) : _mm512_setzero_ps();

  for (size_t b = 0; b < blocks; ++b) {
    for (size_t line = 0; line < 32 * kRows; line += 64)  // prefetch the next tile, which follows this one
      _mm_prefetch(reinterpret_cast<const char*>(x.q) + 32 * kRows * (blocks + b) + line, _MM_HINT_T0);
    __m512 block_f32x16[kRows][2];
#pragma GCC unroll 2
    for (size_t unit = 0; unit < kUnits; ++unit) {
      __m512i sum_i32x16[kRows][2];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
        sum_i32x16[r][0] = sum_i32x16[r][1] = _mm512_set1_epi32(x.zeros[(kUnits * b + unit) * kRows + r]);
#pragma GCC unroll 8
      for (size_t k = 0; k < kSteps; ++k) {
        const size_t step = kSteps * unit + k;
        const __m512i first_u8x64 = _mm512_load_si512(panel.bytes[8 * b + step][0]);
        const __m512i second_u8x64 = _mm512_load_si512(panel.bytes[8 * b + step][16]);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          int32_t four;
          std::memcpy(&four, x.q + ((8 * b + step) * kRows + r) * 4, 4);
          const __m512i x_i8x64 = _mm512_set1_epi32(four);
          sum_i32x16[r][0] = _mm512_dpbusd_epi32(sum_i32x16[r][0], first_u8x64, x_i8x64);
          sum_i32x16[r][1] = _mm512_dpbusd_epi32(sum_i32x16[r][1], second_u8x64, x_i8x64);
        }
      }
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const __m512 scale_f32x16 = _mm512_load_ps(panel.scale[kUnits * b + unit] + 16 * v);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const __m512 sum_f32x16 = _mm512_cvtepi32_ps(sum_i32x16[r][v]);
          block_f32x16[r][v] =
              unit == 0 ? _mm512_mul_ps(sum_f32x16, scale_f32x16) : _mm512_fmadd_ps(sum_f32x16, scale_f32x16, block_f32x16[r][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512 scale_f32x16 = _mm512_set1_ps(x.scale[b * kRows + r]);
      for (int v = 0; v < 2; ++v) total_f32x16[r][v] = _mm512_fmadd_ps(block_f32x16[r][v], scale_f32x16, total_f32x16[r][v]);
    }
    if constexpr (kOffsets) {
#pragma GCC unroll 2
      for (size_t unit = 0; unit < kUnits; ++unit) {
        const __m512 first_f32x16 = _mm512_load_ps(panel.offset[kUnits * b + unit]);
        const __m512 second_f32x16 = _mm512_load_ps(panel.offset[kUnits * b + unit] + 16);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const __m512 sum_f32x16 = _mm512_set1_ps(x.sums[(kUnits * b + unit) * kRows + r]);
          total_f32x16[r][0] = _mm512_fmadd_ps(first_f32x16, sum_f32x16, total_f32x16[r][0]);
          total_f32x16[r][1] = _mm512_fmadd_ps(second_f32x16, sum_f32x16, total_f32x16[r][1]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < 2; ++v) _mm512_storeu_ps(out + r * kPanelRows + 16 * v, total_f32x16[r][v]);
}

template <bool kBy16, bool kOffsets>
void multiply_rows(const Panel& panel, const ByteTraits&, const ActivationTile& x, size_t blocks, bool add, float* out) {
  if constexpr (!kBy16) {
    if (x.rows == 6) return multiply<6, kBy16, kOffsets>(panel, x, blocks, add, out);
    if (x.rows == 5) return multiply<5, kBy16, kOffsets>(panel, x, blocks, add, out);
  }
  if (x.rows == 4) return multiply<4, kBy16, kOffsets>(panel, x, blocks, add, out);
  if (x.rows == 3) return multiply<3, kBy16, kOffsets>(panel, x, blocks, add, out);
  if (x.rows == 2) return multiply<2, kBy16, kOffsets>(panel, x, blocks, add, out);
  return multiply<1, kBy16, kOffsets>(panel, x, blocks, add, out);
}

}  // namespace

MicroKernel micro_kernel_avx512(const ByteTraits& bytes) {
  if (bytes.by_16)  // two more sets of sums are in registers
    return {bytes.offsets ? multiply_rows<true, true> : multiply_rows<true, false>, 4};
  return {bytes.offsets ? multiply_rows<false, true> : multiply_rows<false, false>, 6};
}

}  // namespace fewbits
#endif
