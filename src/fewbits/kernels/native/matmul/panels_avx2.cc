// panels.h with AVX2: maddubs multiplies unsigned bytes by signed ones and adds pairs in 16 bits, where they must not overflow.
//
// A pair of products is at most 2 * 127 * (2^bits - 1). So 16 bits hold the sum of 8 pairs of 4-bit weights, 4 pairs of 5-bit and
// 2 pairs of 6-bit ones before it must be widened, of 7-bit ones just one pair. 8-bit weights are signed and pass their sign to
// the activations: 2 * 127 * 128 fits. A tile is 16 weights (two registers of 8 lanes) by 3 or 4 rows of activations.
//
// Less its zero a code is half as large, so that twice as many products fit, if sums begin with what is owed for the zeros:
// whether they overflow on the way does not matter, only that the whole fits. 16 columns of 6-bit codes and 32 of 5-bit ones are
// then widened once. Where 16 columns have an integer scale, it multiplies their sums when these are widened, and floats are made
// of 32 columns: two such sums are at most 4 * 32,512 * 128, below 2^24, and the floats exact.
#include <algorithm>

#include "matmul/panels.h"
#include "platform/avx2.h"

#if defined(__x86_64__)
namespace fewbits {
namespace {

constexpr int chain_of(int bits, bool owed) { return owed || bits <= 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1; }

// The sum of all products of a unit, less what is owed for the zero, fits 16 bits.
bool unit_fits(const ByteTraits& bytes) {
  int largest = (1 << bytes.bits) - 1;
  if (bytes.levels) largest = *std::max_element(bytes.levels, bytes.levels + 16);
  return !bytes.offsets && std::max(bytes.zero, largest - bytes.zero) * 127 * (bytes.by_16 ? 8 : 16) <= 32767;
}

FEWBITS_AVX2_INLINE __m256i products(__m256i w_x32, __m256i x_i8x32, bool is_signed) {
  if (is_signed) return _mm256_maddubs_epi16(_mm256_abs_epi8(w_x32), _mm256_sign_epi8(x_i8x32, w_x32));
  return _mm256_maddubs_epi16(w_x32, x_i8x32);
}

// 16 weights from `lane`.
template <int kRows, int kBits, bool kBy16, bool kOffsets, bool kOwed>
FEWBITS_AVX2 void multiply(const Panel& panel, const ActivationTile& x, size_t blocks, size_t lane, bool add, float* out) {
  constexpr int kUnits = kBy16 ? 2 : 1, kSteps = 8 / kUnits, kChain = std::min(chain_of(kBits, kOwed), kSteps);
  constexpr bool kSigned = kBits == 8;
  const __m256i ones_i16x16 = _mm256_set1_epi16(1);

  __m256 total_f32x8[kRows][2];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < 2; ++v) total_f32x8[r][v] = add ? _mm256_loadu_ps(out + r * kPanelRows + 8 * v) : _mm256_setzero_ps();

  for (size_t b = 0; b < blocks; ++b) {
    __m256 block_f32x8[kRows][2];
#pragma GCC unroll 2
    for (int unit = 0; unit < kUnits; ++unit) {
      const bool last = unit == kUnits - 1;
      __m256i sum_i32x8[kRows][2];
#pragma GCC unroll 8
      for (int k = 0; k < kSteps; k += kChain) {
        __m256i sum_i16x16[kRows][2];
#pragma GCC unroll 8
        for (int j = 0; j < kChain; ++j) {
          const size_t step = kSteps * unit + k + j;
          const __m256i first_x32 = _mm256_load_si256(reinterpret_cast<const __m256i*>(panel.bytes[8 * b + step][lane]));
          const __m256i second_x32 = _mm256_load_si256(reinterpret_cast<const __m256i*>(panel.bytes[8 * b + step][lane + 8]));
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            int32_t four;
            std::memcpy(&four, x.q + ((8 * b + step) * kRows + r) * 4, 4);
            const __m256i x_i8x32 = _mm256_set1_epi32(four);
            const __m256i first_i16x16 = products(first_x32, x_i8x32, kSigned),
                          second_i16x16 = products(second_x32, x_i8x32, kSigned);
            const bool adds = j || kOwed;
            if (j == 0 && kOwed)
              sum_i16x16[r][0] = sum_i16x16[r][1] = _mm256_set1_epi32(x.zeros[(kUnits * b + unit) * kRows + r]);
            sum_i16x16[r][0] = adds ? now(_mm256_add_epi16(sum_i16x16[r][0], first_i16x16)) : first_i16x16;
            sum_i16x16[r][1] = adds ? now(_mm256_add_epi16(sum_i16x16[r][1], second_i16x16)) : second_i16x16;
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
          for (int v = 0; v < 2; ++v) {
            const __m256i wide_i32x8 = _mm256_madd_epi16(sum_i16x16[r][v], ones_i16x16);
            if (k)
              sum_i32x8[r][v] = now(_mm256_add_epi32(sum_i32x8[r][v], wide_i32x8));
            else
              sum_i32x8[r][v] = kSigned || kOwed
                                    ? wide_i32x8
                                    : _mm256_add_epi32(wide_i32x8, _mm256_set1_epi32(x.zeros[(kUnits * b + unit) * kRows + r]));
          }
      }
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const __m256 scale_f32x8 = _mm256_load_ps(panel.scale[kUnits * b + unit] + lane + 8 * v);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const __m256 sum_f32x8 = _mm256_cvtepi32_ps(sum_i32x8[r][v]);
          block_f32x8[r][v] =
              unit ? _mm256_fmadd_ps(sum_f32x8, scale_f32x8, block_f32x8[r][v]) : _mm256_mul_ps(sum_f32x8, scale_f32x8);
          if (last)
            total_f32x8[r][v] = _mm256_fmadd_ps(block_f32x8[r][v], _mm256_set1_ps(x.scale[b * kRows + r]), total_f32x8[r][v]);
          if constexpr (kOffsets) {
            const __m256 offset_f32x8 = _mm256_load_ps(panel.offset[kUnits * b + unit] + lane + 8 * v);
            total_f32x8[r][v] =
                _mm256_fmadd_ps(offset_f32x8, _mm256_set1_ps(x.sums[(kUnits * b + unit) * kRows + r]), total_f32x8[r][v]);
          }
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < 2; ++v) _mm256_storeu_ps(out + r * kPanelRows + 8 * v, total_f32x8[r][v]);
}

template <int kRows, int kBits, bool kBy16, bool kOffsets, bool kOwed>
void multiply_lanes(const Panel& panel, const ActivationTile& x, size_t blocks, bool add, float* out) {
  for (size_t lane = 0; lane < kPanelRows; lane += 16)
    multiply<kRows, kBits, kBy16, kOffsets, kOwed>(panel, x, blocks, lane, add, out + lane);
}

template <int kBits, bool kOwed>
constexpr size_t kMostRows = kBits <= 4 || kOwed ? 4 : 3;  // else sums of 16 and of 32 bits are needed at once

template <int kBits, bool kBy16, bool kOffsets, bool kOwed = false>
void multiply_rows(const Panel& panel, const ByteTraits&, const ActivationTile& x, size_t blocks, bool add, float* out) {
  if constexpr (kMostRows<kBits, kOwed> == 4)
    if (x.rows == 4) return multiply_lanes<4, kBits, kBy16, kOffsets, kOwed>(panel, x, blocks, add, out);
  if (x.rows == 3) return multiply_lanes<3, kBits, kBy16, kOffsets, kOwed>(panel, x, blocks, add, out);
  if (x.rows == 2) return multiply_lanes<2, kBits, kBy16, kOffsets, kOwed>(panel, x, blocks, add, out);
  return multiply_lanes<1, kBits, kBy16, kOffsets, kOwed>(panel, x, blocks, add, out);
}

// 16 columns under an integer scale, sums that begin with what is owed for the zero.
template <int kRows>
FEWBITS_AVX2 void multiply_integers(const Panel& panel, const ActivationTile& x, size_t blocks, size_t lane, bool add,
                                    float* out) {
  __m256 total_f32x8[kRows][2];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < 2; ++v) total_f32x8[r][v] = add ? _mm256_loadu_ps(out + r * kPanelRows + 8 * v) : _mm256_setzero_ps();
  for (size_t first = 0; first < blocks; first += 8) {  // columns under one scale of scales
    __m256 scaled_f32x8[kRows][2];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) scaled_f32x8[r][0] = scaled_f32x8[r][1] = _mm256_setzero_ps();
    for (size_t b = first; b < std::min(first + 8, blocks); ++b) {
      __m256i sum_i32x8[kRows][2];
#pragma GCC unroll 2
      for (size_t unit = 0; unit < 2; ++unit) {
        __m256i sum_i16x16[kRows][2];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
          sum_i16x16[r][0] = sum_i16x16[r][1] = _mm256_set1_epi32(x.zeros[(2 * b + unit) * kRows + r]);
#pragma GCC unroll 4
        for (size_t j = 0; j < 4; ++j) {
          const size_t step = 8 * b + 4 * unit + j;
          const __m256i first_u8x32 = _mm256_load_si256(reinterpret_cast<const __m256i*>(panel.bytes[step][lane]));
          const __m256i second_u8x32 = _mm256_load_si256(reinterpret_cast<const __m256i*>(panel.bytes[step][lane + 8]));
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            int32_t four;
            std::memcpy(&four, x.q + (step * kRows + r) * 4, 4);
            const __m256i x_i8x32 = _mm256_set1_epi32(four);
            sum_i16x16[r][0] = now(_mm256_add_epi16(sum_i16x16[r][0], _mm256_maddubs_epi16(first_u8x32, x_i8x32)));
            sum_i16x16[r][1] = now(_mm256_add_epi16(sum_i16x16[r][1], _mm256_maddubs_epi16(second_u8x32, x_i8x32)));
          }
        }
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const __m256i by_i16x16 = _mm256_load_si256(reinterpret_cast<const __m256i*>(&panel.sub[2 * b + unit][lane + 8 * v]));
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const __m256i wide_i32x8 = _mm256_madd_epi16(sum_i16x16[r][v], by_i16x16);
            sum_i32x8[r][v] = unit ? _mm256_add_epi32(sum_i32x8[r][v], wide_i32x8) : wide_i32x8;
          }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m256 scale_f32x8 = _mm256_set1_ps(x.scale[b * kRows + r]);
        for (int v = 0; v < 2; ++v)
          scaled_f32x8[r][v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum_i32x8[r][v]), scale_f32x8, scaled_f32x8[r][v]);
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m256 d_f32x8 = _mm256_load_ps(&panel.d[first / 8][lane + 8 * v]);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) total_f32x8[r][v] = _mm256_fmadd_ps(scaled_f32x8[r][v], d_f32x8, total_f32x8[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < 2; ++v) _mm256_storeu_ps(out + r * kPanelRows + 8 * v, total_f32x8[r][v]);
}

void multiply_integer_rows(const Panel& panel, const ByteTraits&, const ActivationTile& x, size_t blocks, bool add, float* out) {
  constexpr decltype(&multiply_integers<1>) kOf[] = {multiply_integers<1>, multiply_integers<2>, multiply_integers<3>,
                                                     multiply_integers<4>};
  for (size_t lane = 0; lane < kPanelRows; lane += 16) kOf[x.rows - 1](panel, x, blocks, lane, add, out + lane);
}

template <int kBits>
MicroKernel of_bits(const ByteTraits& bytes) {
  if constexpr (kBits == 5 || kBits == 6)
    if (unit_fits(bytes))
      return {bytes.by_16 ? multiply_rows<kBits, true, false, true> : multiply_rows<kBits, false, false, true>,
              kMostRows<kBits, true>, true};
  constexpr size_t kRows = kMostRows<kBits, false>;
  if (bytes.by_16) return {bytes.offsets ? multiply_rows<kBits, true, true> : multiply_rows<kBits, true, false>, kRows};
  return {bytes.offsets ? multiply_rows<kBits, false, true> : multiply_rows<kBits, false, false>, kRows};
}

}  // namespace

MicroKernel micro_kernel_avx2(const ByteTraits& bytes, bool integers) {
  if (integers) return {multiply_integer_rows, 4, true};
  if (bytes.bits <= 4) return of_bits<4>(bytes);
  return bytes.bits == 5   ? of_bits<5>(bytes)
         : bytes.bits == 6 ? of_bits<6>(bytes)
         : bytes.bits == 7 ? of_bits<7>(bytes)
                           : of_bits<8>(bytes);
}

}  // namespace fewbits
#endif
