// Symmetric integers with a float16 scale per group or per row: w = scale * q. Codes and scales are two arrays.
//   int4_g32      4.5 bits per weight: byte j holds element 2j low and 2j + 1 high, stored as q + 8; a scale per 32 columns
//   int8_channel  8 bits per weight and 16 per row: int8; one scale for the row
#include "avx2.h"
#include "kernels.h"

namespace fewbits {
namespace {

namespace int4_g32 {

constexpr Layout layout{"int4_g32", 32, {{"codes", 16}, {"scales", 2}}, {{"scales", 2}}};

void decode_ref(RowOf parts, size_t cols, float* out) {
  for (size_t group = 0; group < cols / 32; ++group) {
    const float scale = float16_at(parts[1] + 2 * group);
    for (size_t j = 16 * group; j < 16 * (group + 1); ++j) {
      out[2 * j] = scale * static_cast<float>((parts[0][j] & 15) - 8);
      out[2 * j + 1] = scale * static_cast<float>((parts[0][j] >> 4) - 8);
    }
  }
}

void pack(const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  for (size_t j = 0; j < cols / 2; ++j) parts[0][j] = static_cast<uint8_t>(codes[2 * j] | codes[2 * j + 1] << 4);
  std::memcpy(parts[1], grid[0], cols / 32 * 2);
}

Kernel scalar{layout, "scalar", runs_everywhere, decode_ref, pack};

#if defined(__x86_64__)
// Eight neighbours are one 32-bit word: every lane takes the word and shifts its own nibble down, so no shuffle is needed.
FEWBITS_AVX2 void decode_avx2(RowOf parts, size_t cols, float* out) {
  const __m256i place_i32x8 = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  const __m256i nibble_i32x8 = _mm256_set1_epi32(15), eight_i32x8 = _mm256_set1_epi32(8);
  for (size_t group = 0; group < cols / 32; ++group) {
    const __m256 scale_f32x8 = _mm256_set1_ps(float16_at_avx2(parts[1] + 2 * group));
    for (size_t i = 0; i < 4; ++i) {
      const __m256i word_i32x8 = _mm256_set1_epi32(load<int32_t>(parts[0] + 16 * group + 4 * i));
      const __m256i q_i32x8 = _mm256_and_si256(_mm256_srlv_epi32(word_i32x8, place_i32x8), nibble_i32x8);
      const __m256 level_f32x8 = _mm256_cvtepi32_ps(_mm256_sub_epi32(q_i32x8, eight_i32x8));
      _mm256_storeu_ps(out + 32 * group + 8 * i, _mm256_mul_ps(level_f32x8, scale_f32x8));
    }
  }
}

Kernel avx2{layout, "avx2", has_avx2, decode_avx2};
#endif

}  // namespace int4_g32

namespace int8_channel {

constexpr Layout layout{"int8_channel", 1, {{"codes", 1}, {"scales", 0, 2}}, {{"scales", 0, 2}}};

void decode_ref(RowOf parts, size_t cols, float* out) {
  const float scale = float16_at(parts[1]);
  for (size_t i = 0; i < cols; ++i) out[i] = scale * static_cast<float>(static_cast<int8_t>(parts[0][i]));
}

void pack(const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  for (size_t i = 0; i < cols; ++i) parts[0][i] = codes[i] ^ 0x80;  // code 0 is level -128
  std::memcpy(parts[1], grid[0], 2);
}

Kernel scalar{layout, "scalar", runs_everywhere, decode_ref, pack};

#if defined(__x86_64__)
FEWBITS_AVX2 void decode_avx2(RowOf parts, size_t cols, float* out) {
  const __m256 scale_f32x8 = _mm256_set1_ps(float16_at_avx2(parts[1]));
  size_t i = 0;
  for (; i + 16 <= cols; i += 16) scale_16(load_16(parts[0] + i), scale_f32x8, out + i);
  const uint8_t* const tail[] = {parts[0] + i, parts[1]};
  decode_ref(tail, cols - i, out + i);
}

Kernel avx2{layout, "avx2", has_avx2, decode_avx2};
#endif

}  // namespace int8_channel

}  // namespace
}  // namespace fewbits
