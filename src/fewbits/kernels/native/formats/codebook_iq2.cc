// GGUF's codebooks of eight magnitudes out of 8, 25 and 43: w = d * (2s + 1) / 8 * (+-magnitude). A byte is 64 +- magnitude.
#include "formats/codebook_readers.h"

namespace fewbits {
namespace {

struct Eights {
  static constexpr size_t kDims = 8;
  static constexpr int kBits = 7, kZero = 64;
  static constexpr float kUnit = 0.125f;
  static constexpr bool kShifts = false;
};

struct Iq2Xxs : Eights {
  struct Block {  // 256 weights, 2.0625 bits each, a scale per 32
    uint8_t d[2];
    uint8_t words[8][2][4];  // per 32: the indices of four points; four times seven signs, and the scale above them
  };
  static_assert(sizeof(Block) == 66);
  static constexpr size_t kRun = 32;
  static inline Codebook codebook{"iq2_xxs", 256, kDims, kZero, kUnit, Signs::kSeven};

  static void read(const Block& block, PointCodes& codes) {
    codes.d = load<uint16_t>(block.d);
    for (size_t i = 0; i < 8; ++i) {
      const uint32_t word = load<uint32_t>(block.words[i][1]);
      for (size_t l = 0; l < 4; ++l) {
        codes.index[4 * i + l] = block.words[i][0][l];
        codes.signs[4 * i + l] = kEightSigns[word >> (7 * l) & 127];
      }
      codes.scale[i] = static_cast<uint8_t>(word >> 28);
    }
  }

#if defined(__x86_64__)
  FEWBITS_AVX2_INLINE static void read_avx2(const Block& block, PointsAvx2<Iq2Xxs>& into) {
    const __m256 first_x8 = _mm256_castsi256_ps(load_32(block.words[0][0])),
                 second_x8 = _mm256_castsi256_ps(load_32(block.words[4][0]));
    const __m256i index_u8x32 = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(first_x8, second_x8, 0x88)), 0xd8);
    const __m256i words_u32x8 = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(first_x8, second_x8, 0xdd)), 0xd8);
    store_32(into.index, _mm256_cvtepu8_epi16(_mm256_castsi256_si128(index_u8x32)));
    store_32(into.index + 16, _mm256_cvtepu8_epi16(_mm256_extracti128_si256(index_u8x32, 1)));
    store_32(into.signs, signs_of_words(words_u32x8));
    store_scales(_mm256_srli_epi32(words_u32x8, 28), float16_at_avx2(block.d) * kUnit, into.scale);
  }
#endif
};

#if defined(__x86_64__)
// Sixteen scales, in nibbles.
FEWBITS_AVX2_INLINE void store_sixteen(const uint8_t* nibbles, float unit, float* into) {
  const __m128i s_u8x16 = nibbles_in_order(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(nibbles)));
  store_scales(_mm256_cvtepu8_epi32(s_u8x16), unit, into);
  store_scales(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(s_u8x16, s_u8x16)), unit, into + 8);
}
#endif

struct Iq2Xs : Eights {
  struct Block {  // 256 weights, 2.3125 bits each, a scale per 16
    uint8_t d[2];
    uint8_t points[32][2];  // index of 9 bits, seven signs above it
    uint8_t scales[8];      // nibbles, the even one low
  };
  static_assert(sizeof(Block) == 74);
  static constexpr size_t kRun = 16;
  static inline Codebook codebook{"iq2_xs", 512, kDims, kZero, kUnit, Signs::kSeven};

  static void read(const Block& block, PointCodes& codes) {
    codes.d = load<uint16_t>(block.d);
    for (size_t l = 0; l < 32; ++l) {
      const uint32_t point = load<uint16_t>(block.points[l]);
      codes.index[l] = point & 511;
      codes.signs[l] = kEightSigns[point >> 9];
    }
    read_nibbles(block.scales, 16, codes.scale);
  }

#if defined(__x86_64__)
  FEWBITS_AVX2_INLINE static void read_avx2(const Block& block, PointsAvx2<Iq2Xs>& into) {
    const __m256i first_u16x16 = load_32(block.points[0]), second_u16x16 = load_32(block.points[16]),
                  index_u16x16 = _mm256_set1_epi16(511);
    store_32(into.index, _mm256_and_si256(first_u16x16, index_u16x16));
    store_32(into.index + 16, _mm256_and_si256(second_u16x16, index_u16x16));
    const __m256i seven_u8x32 = _mm256_packus_epi16(_mm256_srli_epi16(first_u16x16, 9), _mm256_srli_epi16(second_u16x16, 9));
    store_32(into.signs, with_parity(_mm256_permute4x64_epi64(seven_u8x32, 0xd8)));
    store_sixteen(block.scales, float16_at_avx2(block.d) * kUnit, into.scale);
  }
#endif
};

struct Iq2S : Eights {
  struct Block {  // 256 weights, 2.5625 bits each, a scale per 16
    uint8_t d[2];
    uint8_t low[32];  // of the indices, eight bits
    uint8_t signs[32];
    uint8_t high[8];    // two bits for each of four points
    uint8_t scales[8];  // nibbles, the even one low
  };
  static_assert(sizeof(Block) == 82);
  static constexpr size_t kRun = 16;
  static inline Codebook codebook{"iq2_s", 1024, kDims, kZero, kUnit, Signs::kEight};

  static void read(const Block& block, PointCodes& codes) {
    codes.d = load<uint16_t>(block.d);
    for (size_t l = 0; l < 32; ++l)
      codes.index[l] = static_cast<uint16_t>(block.low[l] | (block.high[l / 4] >> (l % 4 * 2) & 3) << 8);
    std::memcpy(codes.signs, block.signs, 32);
    read_nibbles(block.scales, 16, codes.scale);
  }

#if defined(__x86_64__)
  FEWBITS_AVX2_INLINE static void read_avx2(const Block& block, PointsAvx2<Iq2S>& into) {
    const __m256i byte_of_x32 = _mm256_setr_epi8(0, -1, 0, -1, 0, -1, 0, -1, 1, -1, 1, -1, 1, -1, 1, -1,  //
                                                 2, -1, 2, -1, 2, -1, 2, -1, 3, -1, 3, -1, 3, -1, 3, -1);
    const __m256i place_u16x16 = _mm256_set1_epi64x(256ll | 64ll << 16 | 16ll << 32 | 4ll << 48);  // to bits 8 and 9
#pragma GCC unroll 2
    for (size_t half = 0; half < 2; ++half) {
      const __m256i bytes_u16x16 = _mm256_shuffle_epi8(_mm256_set1_epi32(load<int32_t>(block.high + 4 * half)), byte_of_x32);
      const __m256i high_u16x16 = _mm256_and_si256(_mm256_mullo_epi16(bytes_u16x16, place_u16x16), _mm256_set1_epi16(0x300));
      store_32(into.index + 16 * half, _mm256_or_si256(wide_16(block.low + 16 * half), high_u16x16));
    }
    store_32(into.signs, load_32(block.signs));
    store_sixteen(block.scales, float16_at_avx2(block.d) * kUnit, into.scale);
  }
#endif
};

constexpr Layout xxs{"iq2_xxs", 256, {{"blocks", sizeof(Iq2Xxs::Block)}}, {{"sub", 8}, {"d", 2}}};
constexpr Layout xs{"iq2_xs", 256, {{"blocks", sizeof(Iq2Xs::Block)}}, {{"sub", 16}, {"d", 2}}};
constexpr Layout s{"iq2_s", 256, {{"blocks", sizeof(Iq2S::Block)}}, {{"sub", 16}, {"d", 2}}};
CodebookReaders<Iq2Xxs> xxs_readers{xxs, nullptr};
CodebookReaders<Iq2Xs> xs_readers{xs, nullptr};
CodebookReaders<Iq2S> s_readers{s, nullptr};

}  // namespace
}  // namespace fewbits
