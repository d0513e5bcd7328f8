// GGUF's codebooks of four magnitudes: w = d * (2s + 1) * unit * (+-magnitude). A byte is the zero +- the magnitude.
#include "formats/codebook_readers.h"

namespace fewbits {
namespace {

struct Iq3Xxs {
  struct Block {  // 256 weights, 3.0625 bits each, a scale per 32; magnitudes 4 to 62
    uint8_t d[2];
    uint8_t index[64];
    uint8_t words[8][4];  // per 32: four times seven signs, of two points each, and the scale above them
  };
  static_assert(sizeof(Block) == 98);
  static constexpr size_t kDims = 4, kRun = 32;
  static constexpr int kBits = 7, kZero = 64;
  static constexpr float kUnit = 0.25f;
  static constexpr bool kShifts = false;
  static inline Codebook codebook{"iq3_xxs", 256, kDims, kZero, kUnit, Signs::kSeven};

  static void read(const Block& block, PointCodes& codes) {
    codes.d = load<uint16_t>(block.d);
    for (size_t l = 0; l < 64; ++l) codes.index[l] = block.index[l];
    for (size_t i = 0; i < 8; ++i) {
      const uint32_t word = load<uint32_t>(block.words[i]);
      for (size_t l = 0; l < 4; ++l) codes.signs[4 * i + l] = kEightSigns[word >> (7 * l) & 127];
      codes.scale[i] = static_cast<uint8_t>(word >> 28);
    }
  }

#if defined(__x86_64__)
  FEWBITS_AVX2_INLINE static void read_avx2(const Block& block, PointsAvx2<Iq3Xxs>& into) {
#pragma GCC unroll 4
    for (size_t l = 0; l < 64; l += 16) store_32(into.index + l, wide_16(block.index + l));
    const __m256i words_u32x8 = load_32(block.words[0]);
    store_32(into.signs, signs_of_words(words_u32x8));
    store_scales(_mm256_srli_epi32(words_u32x8, 28), float16_at_avx2(block.d) * kUnit, into.scale);
  }
#endif
};

struct Iq3S {
  struct Block {  // 256 weights, 3.4375 bits each, a scale per 32; magnitudes 1 to 15
    uint8_t d[2];
    uint8_t low[64];  // of the indices, eight bits
    uint8_t high[8];  // one bit for each of eight points
    uint8_t signs[32];
    uint8_t scales[4];  // nibbles, the even one low
  };
  static_assert(sizeof(Block) == 110);
  static constexpr size_t kDims = 4, kRun = 32;
  static constexpr int kBits = 5, kZero = 16;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kShifts = false;
  static inline Codebook codebook{"iq3_s", 512, kDims, kZero, kUnit, Signs::kEight};

  static void read(const Block& block, PointCodes& codes) {
    codes.d = load<uint16_t>(block.d);
    for (size_t l = 0; l < 64; ++l)
      codes.index[l] = static_cast<uint16_t>(block.low[l] | (block.high[l / 8] >> (l % 8) & 1) << 8);
    std::memcpy(codes.signs, block.signs, 32);
    read_nibbles(block.scales, 8, codes.scale);
  }

#if defined(__x86_64__)
  FEWBITS_AVX2_INLINE static void read_avx2(const Block& block, PointsAvx2<Iq3S>& into) {
    const __m256i bit_u16x16 = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
#pragma GCC unroll 4
    for (size_t l = 0; l < 64; l += 16) {
      const __m256i sixteen_u16x16 = _mm256_and_si256(_mm256_set1_epi16(load<int16_t>(block.high + l / 8)), bit_u16x16);
      const __m256i high_u16x16 = _mm256_and_si256(_mm256_cmpeq_epi16(sixteen_u16x16, bit_u16x16), _mm256_set1_epi16(256));
      store_32(into.index + l, _mm256_or_si256(wide_16(block.low + l), high_u16x16));
    }
    store_32(into.signs, load_32(block.signs));
    const __m128i s_u8x16 = nibbles_in_order(_mm_cvtsi32_si128(load<int32_t>(block.scales)));
    store_scales(_mm256_cvtepu8_epi32(s_u8x16), float16_at_avx2(block.d) * kUnit, into.scale);
  }
#endif
};

constexpr Layout xxs{"iq3_xxs", 256, {{"blocks", sizeof(Iq3Xxs::Block)}}, {{"sub", 8}, {"d", 2}}};
constexpr Layout s{"iq3_s", 256, {{"blocks", sizeof(Iq3S::Block)}}, {{"sub", 8}, {"d", 2}}};
CodebookReaders<Iq3Xxs> xxs_readers{xxs, nullptr};
CodebookReaders<Iq3S> s_readers{s, nullptr};

}  // namespace
}  // namespace fewbits
