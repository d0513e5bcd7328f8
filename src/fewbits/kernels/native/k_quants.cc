// GGUF's K-quants: super-blocks of 256 weights whose sub-block scales are 6-bit integers under one float16.
#include "avx2.h"
#include "kernels.h"

namespace fewbits {
namespace {

namespace q3_k {

struct Block {        // 256 weights, 3.4375 bits each: w = d * scale * (q - 4), a scale per 16
  uint8_t hmask[32];  // bit i of byte l: third bit of element 32i + l
  uint8_t qs[64];     // per 128 weights: byte l holds the low two bits of l, l + 32, l + 64, l + 96
  uint8_t low[8];     // scales i (low nibble) and i + 8 (high nibble): their low four bits
  uint8_t top[4];     // scales i, i + 4, i + 8, i + 12: their top two bits; a scale is stored + 32
  uint8_t d[2];       // float16 scale of the scales
};
static_assert(sizeof(Block) == 110);

constexpr Layout layout{"q3_k", 256, {{"blocks", sizeof(Block)}}, {{"sub", 16}, {"d", 2}}};

int scale_of(const Block& block, size_t i) {
  const int low = i < 8 ? block.low[i] & 15 : block.low[i - 8] >> 4;
  return (low | (block.top[i % 4] >> (i / 4 * 2) & 3) << 4) - 32;
}

void decode_ref(RowOf parts, size_t cols, float* out) {
  const auto* block = reinterpret_cast<const Block*>(parts[0]);
  for (size_t b = 0; b < cols / 256; ++b, ++block, out += 256) {
    const float d = float16_at(block->d);
    for (size_t run = 0; run < 256; run += 16) {
      const float scale = d * static_cast<float>(scale_of(*block, run / 16));
      const uint8_t *qs = block->qs + run / 128 * 32 + run % 32, *hmask = block->hmask + run % 32;
      for (size_t j = 0; j < 16; ++j) {
        const int low = qs[j] >> (run % 128 / 32 * 2) & 3, high = hmask[j] >> (run / 32) & 1;
        out[run + j] = scale * static_cast<float>((low | high << 2) - 4);
      }
    }
  }
}

void pack(const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  auto* block = reinterpret_cast<Block*>(parts[0]);
  const uint8_t *sub = grid[0], *d = grid[1];
  for (size_t b = 0; b < cols / 256; ++b, ++block, codes += 256, sub += 16, d += 2) {
    *block = {};
    for (size_t i = 0; i < 256; ++i) {
      block->hmask[i % 32] |= static_cast<uint8_t>(codes[i] >> 2 << (i / 32));
      block->qs[i / 128 * 32 + i % 32] |= static_cast<uint8_t>((codes[i] & 3) << (i % 128 / 32 * 2));
    }
    for (size_t i = 0; i < 16; ++i) {
      const uint8_t scale = static_cast<uint8_t>(sub[i] + 32);
      block->low[i % 8] |= static_cast<uint8_t>((scale & 15) << (i / 8 * 4));
      block->top[i % 4] |= static_cast<uint8_t>(scale >> 4 << (i / 4 * 2));
    }
    std::memcpy(block->d, d, 2);
  }
}

Kernel scalar{layout, "scalar", runs_everywhere, decode_ref, pack};

#if defined(__x86_64__)
FEWBITS_AVX2 void scales_avx2(const Block& block, float* out) {
  const uint64_t low_u8x8 = load<uint64_t>(block.low), nibbles = 0x0f0f0f0f0f0f0f0f;
  const __m128i low_u8x16 =
      _mm_set_epi64x(static_cast<int64_t>(low_u8x8 >> 4 & nibbles), static_cast<int64_t>(low_u8x8 & nibbles));
  const __m128i top_u8x16 = _mm_srlv_epi32(_mm_set1_epi32(load<int32_t>(block.top)), _mm_setr_epi32(0, 2, 4, 6));
  const __m128i top_in_place_u8x16 = _mm_slli_epi32(_mm_and_si128(top_u8x16, _mm_set1_epi8(3)), 4);
  const __m128i scale_i8x16 = _mm_sub_epi8(_mm_or_si128(low_u8x16, top_in_place_u8x16), _mm_set1_epi8(32));
  scale_16(scale_i8x16, _mm256_set1_ps(float16_at_avx2(block.d)), out);
}

FEWBITS_AVX2 void decode_avx2(RowOf parts, size_t cols, float* out) {
  const auto* block = reinterpret_cast<const Block*>(parts[0]);
  const __m256i two_bits_u8x32 = _mm256_set1_epi8(3), third_bit_u8x32 = _mm256_set1_epi8(4);
  for (const float* end = out + cols; out != end; ++block) {
    float scale[16];
    scales_avx2(*block, scale);
    // The third bit must come to bit 2: that of the first 32 weights lies two places below, each next one a place higher.
    const __m256i hmask_u8x32 = load_32(block->hmask);
    for (int i = 0; i < 8; ++i, out += 32) {
      const __m256i low_u8x32 =
          _mm256_and_si256(_mm256_srl_epi16(load_32(block->qs + i / 4 * 32), _mm_cvtsi32_si128(i % 4 * 2)), two_bits_u8x32);
      const __m256i shifted_u8x32 = i < 2 ? _mm256_sll_epi16(hmask_u8x32, _mm_cvtsi32_si128(2 - i))
                                          : _mm256_srl_epi16(hmask_u8x32, _mm_cvtsi32_si128(i - 2));
      // q - 4 in int8: a clear third bit means -4, so it is (low | third) - 4.
      const __m256i q_i8x32 =
          _mm256_sub_epi8(_mm256_or_si256(low_u8x32, _mm256_and_si256(shifted_u8x32, third_bit_u8x32)), third_bit_u8x32);
      scale_16(_mm256_castsi256_si128(q_i8x32), _mm256_set1_ps(scale[2 * i]), out);
      scale_16(_mm256_extracti128_si256(q_i8x32, 1), _mm256_set1_ps(scale[2 * i + 1]), out + 16);
    }
  }
}

Kernel avx2{layout, "avx2", has_avx2, decode_avx2};
#endif

}  // namespace q3_k

namespace q4_k {

struct Block {           // 256 weights, 4.5 bits each: w = d * scale * q - dmin * min, a scale and a min per 32
  uint8_t d[2];          // float16 scale of the scales
  uint8_t dmin[2];       // float16 scale of the mins
  uint8_t scales[4];     // low six bits: scale i; top two: the top two of scale i + 4
  uint8_t mins[4];       // the same of the mins
  uint8_t rest[4];       // low nibble: the low four bits of scale i + 4; high nibble: those of min i + 4
  uint8_t nibbles[128];  // per 64 weights: byte j holds element j low, j + 32 high
};
static_assert(sizeof(Block) == 144);

constexpr Layout layout{"q4_k", 256, {{"blocks", sizeof(Block)}}, {{"sub", 8}, {"sub_min", 8}, {"d", 2}, {"dmin", 2}}};

int scale_of(const Block& block, size_t i) {
  return i < 4 ? block.scales[i] & 63 : (block.rest[i - 4] & 15) | block.scales[i - 4] >> 6 << 4;
}

int min_of(const Block& block, size_t i) {
  return i < 4 ? block.mins[i] & 63 : block.rest[i - 4] >> 4 | block.mins[i - 4] >> 6 << 4;
}

void decode_ref(RowOf parts, size_t cols, float* out) {
  const auto* block = reinterpret_cast<const Block*>(parts[0]);
  for (size_t b = 0; b < cols / 256; ++b, ++block, out += 256) {
    const float d = float16_at(block->d), dmin = float16_at(block->dmin);
    for (size_t run = 0; run < 8; ++run) {
      const float scale = d * static_cast<float>(scale_of(*block, run));
      const float min = dmin * static_cast<float>(min_of(*block, run));
      const uint8_t* nibbles = block->nibbles + run / 2 * 32;
      for (size_t j = 0; j < 32; ++j) out[32 * run + j] = scale * static_cast<float>(nibbles[j] >> (run % 2 * 4) & 15) - min;
    }
  }
}

void pack(const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  auto* block = reinterpret_cast<Block*>(parts[0]);
  const uint8_t *sub = grid[0], *sub_min = grid[1], *d = grid[2], *dmin = grid[3];
  for (size_t b = 0; b < cols / 256; ++b, ++block, codes += 256, sub += 8, sub_min += 8, d += 2, dmin += 2) {
    std::memcpy(block->d, d, 2);
    std::memcpy(block->dmin, dmin, 2);
    for (size_t i = 0; i < 4; ++i) {
      block->scales[i] = static_cast<uint8_t>(sub[i] | sub[i + 4] >> 4 << 6);
      block->mins[i] = static_cast<uint8_t>(sub_min[i] | sub_min[i + 4] >> 4 << 6);
      block->rest[i] = static_cast<uint8_t>((sub[i + 4] & 15) | (sub_min[i + 4] & 15) << 4);
    }
    for (size_t j = 0; j < 128; ++j) {
      const uint8_t* low = codes + j / 32 * 64 + j % 32;
      block->nibbles[j] = static_cast<uint8_t>(low[0] | low[32] << 4);
    }
  }
}

Kernel scalar{layout, "scalar", runs_everywhere, decode_ref, pack};

#if defined(__x86_64__)
// out[0..7] = factor * the eight 6-bit integers whose four first are the low bits of `six`, and whose last are
// `rest` under the top two bits of `six`.
FEWBITS_AVX2 void six_bit_avx2(uint32_t six_u8x4, uint32_t rest_u8x4, float factor, float* out) {
  const uint32_t last_u8x4 = (rest_u8x4 & 0x0f0f0f0f) | (six_u8x4 >> 2 & 0x30303030);
  const uint64_t all_u8x8 = (six_u8x4 & 0x3f3f3f3f) | static_cast<uint64_t>(last_u8x4) << 32;
  const __m256i wide_i32x8 = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(all_u8x8)));
  _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtepi32_ps(wide_i32x8), _mm256_set1_ps(factor)));
}

// out[0..15] = scale * q - min; the product is exact (11 + 6 + 4 bits), the subtraction rounds
FEWBITS_AVX2 void scale_16_minus(__m128i q_u8x16, __m256 scale_f32x8, __m256 min_f32x8, float* out) {
  const __m256i first_i32x8 = _mm256_cvtepu8_epi32(q_u8x16);
  const __m256i second_i32x8 = _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(q_u8x16, q_u8x16));
  _mm256_storeu_ps(out, _mm256_sub_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(first_i32x8), scale_f32x8), min_f32x8));
  _mm256_storeu_ps(out + 8, _mm256_sub_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(second_i32x8), scale_f32x8), min_f32x8));
}

FEWBITS_AVX2 void decode_avx2(RowOf parts, size_t cols, float* out) {
  const auto* block = reinterpret_cast<const Block*>(parts[0]);
  const __m128i nibble_u8x16 = _mm_set1_epi8(15);
  for (const float* end = out + cols; out != end; ++block) {
    const uint32_t rest_u8x4 = load<uint32_t>(block->rest);
    float scale[8], min[8];
    six_bit_avx2(load<uint32_t>(block->scales), rest_u8x4, float16_at_avx2(block->d), scale);
    six_bit_avx2(load<uint32_t>(block->mins), rest_u8x4 >> 4, float16_at_avx2(block->dmin), min);
    for (size_t i = 0; i < 8; i += 2, out += 64) {
      const __m256 first_f32x8 = _mm256_set1_ps(scale[i]), first_min_f32x8 = _mm256_set1_ps(min[i]);
      const __m256 second_f32x8 = _mm256_set1_ps(scale[i + 1]), second_min_f32x8 = _mm256_set1_ps(min[i + 1]);
      for (size_t half = 0; half < 32; half += 16) {
        const __m128i both_u8x16 = load_16(block->nibbles + 16 * i + half);
        scale_16_minus(_mm_and_si128(both_u8x16, nibble_u8x16), first_f32x8, first_min_f32x8, out + half);
        scale_16_minus(_mm_and_si128(_mm_srli_epi16(both_u8x16, 4), nibble_u8x16), second_f32x8, second_min_f32x8,
                       out + 32 + half);
      }
    }
  }
}

Kernel avx2{layout, "avx2", has_avx2, decode_avx2};
#endif

}  // namespace q4_k

}  // namespace
}  // namespace fewbits
