// A format of our own: 3-bit codes in one little-endian stream, 6-bit scales in another.
#include "avx2.h"
#include "kernels.h"

namespace fewbits {
namespace {

namespace q3_s6 {

struct Block {        // 256 weights, 3.25 bits each: w = d * scale * (q - 4), a scale per 32
  uint8_t d[2];       // float16 scale of the scales
  uint8_t scales[6];  // eight 6-bit integers: number i begins at bit 6i
  uint8_t codes[96];  // 3-bit codes: number i begins at bit 3i, so eight of them are three bytes
};
static_assert(sizeof(Block) == 104);

constexpr Layout layout{"q3_s6", 256, {{"blocks", sizeof(Block)}}, {{"sub", 8}, {"d", 2}}};

uint64_t stream_of_scales(const Block& block) {
  uint64_t stream = 0;
  std::memcpy(&stream, block.scales, sizeof block.scales);
  return stream;
}

void decode_ref(RowOf parts, size_t cols, float* out) {
  const auto* block = reinterpret_cast<const Block*>(parts[0]);
  for (size_t b = 0; b < cols / 256; ++b, ++block, out += 256) {
    const float d = float16_at(block->d);
    const uint64_t scales = stream_of_scales(*block);
    for (size_t i = 0; i < 32; ++i) {
      const uint8_t* three_bytes = block->codes + 3 * i;
      const int eight = three_bytes[0] | three_bytes[1] << 8 | three_bytes[2] << 16;
      const float scale = d * static_cast<float>(static_cast<int>(scales >> (i / 4 * 6) & 63));
      for (size_t j = 0; j < 8; ++j) out[8 * i + j] = scale * static_cast<float>((eight >> (3 * j) & 7) - 4);
    }
  }
}

void pack(const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  auto* block = reinterpret_cast<Block*>(parts[0]);
  const uint8_t *sub = grid[0], *d = grid[1];
  for (size_t b = 0; b < cols / 256; ++b, ++block, sub += 8, d += 2) {
    std::memcpy(block->d, d, 2);
    uint64_t scales = 0;
    for (size_t i = 0; i < 8; ++i) scales |= static_cast<uint64_t>(sub[i]) << (6 * i);
    std::memcpy(block->scales, &scales, sizeof block->scales);
    for (size_t i = 0; i < 32; ++i, codes += 8) {
      uint32_t eight = 0;
      for (size_t j = 0; j < 8; ++j) eight |= static_cast<uint32_t>(codes[j]) << (3 * j);
      std::memcpy(block->codes + 3 * i, &eight, 3);
    }
  }
}

Kernel scalar{layout, "scalar", runs_everywhere, decode_ref, pack};

#if defined(__x86_64__)
// Eight levels fit one register, so each run of 32 makes a table of its eight values, and a weight costs a shift and a look-up:
// vpermps reads the lowest three bits of a lane and ignores the rest, which is just what the shift leaves.
FEWBITS_AVX2 void decode_avx2(RowOf parts, size_t cols, float* out) {
  const auto* block = reinterpret_cast<const Block*>(parts[0]);
  const __m256 level_f32x8 = _mm256_setr_ps(-4, -3, -2, -1, 0, 1, 2, 3);
  // A word is read from one byte early, the block's own, because the last one would otherwise reach a byte past the weight.
  const __m256i place_i32x8 = _mm256_setr_epi32(8, 11, 14, 17, 20, 23, 26, 29);
  for (const float* end = out + cols; out != end; ++block) {
    const float d = float16_at_avx2(block->d);
    uint64_t scales = stream_of_scales(*block);
    const uint8_t* word = reinterpret_cast<const uint8_t*>(block) + offsetof(Block, codes) - 1;
    for (int run = 0; run < 8; ++run, scales >>= 6) {
      const float scale = d * static_cast<float>(static_cast<int>(scales & 63));
      const __m256 value_f32x8 = _mm256_mul_ps(_mm256_set1_ps(scale), level_f32x8);
      for (int i = 0; i < 4; ++i, word += 3, out += 8) {
        const __m256i code_i32x8 = _mm256_srlv_epi32(_mm256_set1_epi32(load<int32_t>(word)), place_i32x8);
        _mm256_storeu_ps(out, _mm256_permutevar8x32_ps(value_f32x8, code_i32x8));
      }
    }
  }
}

Kernel avx2{layout, "avx2", has_avx2, decode_avx2};
#endif

}  // namespace q3_s6

}  // namespace
}  // namespace fewbits
