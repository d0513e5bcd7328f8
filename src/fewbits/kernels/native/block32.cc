// GGUF's blocks of 32 with one float16 scale: w = d * q.
#include "avx2.h"
#include "kernels.h"

namespace fewbits {
namespace {

namespace q4_0 {

struct Block {          // 32 weights, 4.5 bits each
  uint8_t d[2];         // float16 scale
  uint8_t nibbles[16];  // byte j: element j low, j + 16 high; stored as q + 8
};
static_assert(sizeof(Block) == 18);

constexpr Layout layout{"q4_0", 32, {{"blocks", sizeof(Block)}}, {{"d", 2}}};

void decode_ref(RowOf parts, size_t cols, float* out) {
  const auto* block = reinterpret_cast<const Block*>(parts[0]);
  for (size_t start = 0; start < cols; start += 32, ++block) {
    const float d = float16_at(block->d);
    for (size_t j = 0; j < 16; ++j) {
      out[start + j] = d * static_cast<float>((block->nibbles[j] & 15) - 8);
      out[start + j + 16] = d * static_cast<float>((block->nibbles[j] >> 4) - 8);
    }
  }
}

void pack(const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  auto* block = reinterpret_cast<Block*>(parts[0]);
  for (size_t b = 0; b < cols / 32; ++b, ++block, codes += 32) {
    std::memcpy(block->d, grid[0] + 2 * b, 2);
    for (size_t j = 0; j < 16; ++j) block->nibbles[j] = static_cast<uint8_t>(codes[j] | codes[j + 16] << 4);
  }
}

Kernel scalar{layout, "scalar", runs_everywhere, decode_ref, pack};

#if defined(__x86_64__)
FEWBITS_AVX2 void decode_avx2(RowOf parts, size_t cols, float* out) {
  const auto* block = reinterpret_cast<const Block*>(parts[0]);
  const __m128i nibble_u8x16 = _mm_set1_epi8(15), eight_i8x16 = _mm_set1_epi8(8);
  for (const float* end = out + cols; out != end; out += 32, ++block) {
    const __m256 d_f32x8 = _mm256_set1_ps(float16_at_avx2(block->d));
    const __m128i both_u8x16 = load_16(block->nibbles);
    const __m128i low_u8x16 = _mm_and_si128(both_u8x16, nibble_u8x16);
    const __m128i high_u8x16 = _mm_and_si128(_mm_srli_epi16(both_u8x16, 4), nibble_u8x16);
    scale_16(_mm_sub_epi8(low_u8x16, eight_i8x16), d_f32x8, out);
    scale_16(_mm_sub_epi8(high_u8x16, eight_i8x16), d_f32x8, out + 16);
  }
}

Kernel avx2{layout, "avx2", has_avx2, decode_avx2};
#endif

}  // namespace q4_0

namespace q8_0 {

struct Block {    // 32 weights, 8.5 bits each
  uint8_t d[2];   // float16 scale
  uint8_t q[32];  // int8
};
static_assert(sizeof(Block) == 34);

constexpr Layout layout{"q8_0", 32, {{"blocks", sizeof(Block)}}, {{"d", 2}}};

void decode_ref(RowOf parts, size_t cols, float* out) {
  const auto* block = reinterpret_cast<const Block*>(parts[0]);
  for (size_t start = 0; start < cols; start += 32, ++block) {
    const float d = float16_at(block->d);
    for (size_t j = 0; j < 32; ++j) out[start + j] = d * static_cast<float>(static_cast<int8_t>(block->q[j]));
  }
}

void pack(const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  auto* block = reinterpret_cast<Block*>(parts[0]);
  for (size_t b = 0; b < cols / 32; ++b, ++block, codes += 32) {
    std::memcpy(block->d, grid[0] + 2 * b, 2);
    for (size_t j = 0; j < 32; ++j) block->q[j] = codes[j] ^ 0x80;  // code 0 is level -128
  }
}

Kernel scalar{layout, "scalar", runs_everywhere, decode_ref, pack};

#if defined(__x86_64__)
FEWBITS_AVX2 void decode_avx2(RowOf parts, size_t cols, float* out) {
  const auto* block = reinterpret_cast<const Block*>(parts[0]);
  for (const float* end = out + cols; out != end; out += 32, ++block) {
    const __m256 d_f32x8 = _mm256_set1_ps(float16_at_avx2(block->d));
    scale_16(load_16(block->q), d_f32x8, out);
    scale_16(load_16(block->q + 16), d_f32x8, out + 16);
  }
}

Kernel avx2{layout, "avx2", has_avx2, decode_avx2};
#endif

}  // namespace q8_0

}  // namespace
}  // namespace fewbits
