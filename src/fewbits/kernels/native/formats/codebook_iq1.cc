// GGUF's codebook of eight out of -1, 0 and 1: w = d * (2s + 1) / 8 * (8 * coordinate +- 1). A byte is 9 + 8 * coordinate +- 1.
#include "formats/codebook_readers.h"

namespace fewbits {
namespace {

struct Ternary {
  static constexpr size_t kDims = 8;
  static constexpr int kBits = 5, kZero = 9;
  static constexpr float kUnit = 0.125f;
  static constexpr bool kShifts = true;
};

#if defined(__x86_64__)
// All ones or zeros to -1 or 1.
FEWBITS_AVX2_INLINE __m256i shift_of(__m256i down_x32) {
  return _mm256_or_si256(_mm256_add_epi8(down_x32, down_x32), _mm256_set1_epi8(1));
}

// Four times three bits of each number, in four numbers, moved to bit 12; what is above them is to be masked away.
FEWBITS_AVX2_INLINE __m256i threes_at_12(__m256i four_times_u16x16) {
  return _mm256_mullo_epi16(four_times_u16x16, _mm256_set1_epi64x(4096ll | 512ll << 16 | 64ll << 32 | 8ll << 48));
}

// Each of four 16-bit numbers four times.
FEWBITS_AVX2_INLINE __m256i four_times(const uint8_t* at) {
  return _mm256_shuffle_epi8(_mm256_set1_epi64x(load<int64_t>(at)),
                             _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3,  //
                                              4, 5, 4, 5, 4, 5, 4, 5, 6, 7, 6, 7, 6, 7, 6, 7));
}
#endif

struct Iq1S : Ternary {
  struct Block {  // 256 weights, 1.5625 bits each, a scale and a shift per 32
    uint8_t d[2];
    uint8_t low[32];      // of the indices, eight bits
    uint8_t words[8][2];  // four times three high bits of an index, the scale (3 bits), the shift (1: down)
  };
  static_assert(sizeof(Block) == 50);
  static constexpr size_t kRun = 32;
  static inline Codebook codebook{"iq1_s", 2048, kDims, kZero, kUnit, Signs::kOfRun};

  static void read(const Block& block, PointCodes& codes) {
    codes.d = load<uint16_t>(block.d);
    for (size_t i = 0; i < 8; ++i) {
      const uint32_t word = load<uint16_t>(block.words[i]);
      for (size_t l = 4 * i; l < 4 * i + 4; ++l) {
        codes.index[l] = static_cast<uint16_t>(block.low[l] | (word >> (l % 4 * 3) & 7) << 8);
        codes.signs[l] = word >> 15 ? 255 : 0;
      }
      codes.scale[i] = word >> 12 & 7;
    }
  }

#if defined(__x86_64__)
  FEWBITS_AVX2_INLINE static void read_avx2(const Block& block, PointsAvx2<Iq1S>& into) {
#pragma GCC unroll 2
    for (size_t half = 0; half < 2; ++half) {
      const __m256i high_u16x16 = _mm256_srli_epi16(threes_at_12(four_times(block.words[4 * half])), 4);
      store_32(into.index + 16 * half,
               _mm256_or_si256(wide_16(block.low + 16 * half), _mm256_and_si256(high_u16x16, _mm256_set1_epi16(0x700))));
    }
    const __m128i words_u16x8 = load_16(block.words[0]);
    const __m256i down_x32 = _mm256_broadcastsi128_si256(_mm_srai_epi16(words_u16x8, 15));
    const __m256i word_of_x32 = _mm256_setr_epi8(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6,  //
                                                 8, 8, 8, 8, 10, 10, 10, 10, 12, 12, 12, 12, 14, 14, 14, 14);
    store_32(into.signs, shift_of(_mm256_shuffle_epi8(down_x32, word_of_x32)));
    const __m256i s_i32x8 = _mm256_and_si256(_mm256_srli_epi32(_mm256_cvtepu16_epi32(words_u16x8), 12), _mm256_set1_epi32(7));
    store_scales(s_i32x8, float16_at_avx2(block.d) * kUnit, into.scale);
  }
#endif
};

struct Iq1M : Ternary {
  struct Block {          // 256 weights, 1.75 bits each, a scale per 16, a shift per 8
    uint8_t low[32];      // of the indices, eight bits
    uint8_t high[16];     // nibbles, the even point low: three high bits of the index, the shift (1: down)
    uint8_t words[4][2];  // four scales of three bits; above them four bits of d, the lowest first
  };
  static_assert(sizeof(Block) == 56);
  static constexpr size_t kRun = 16;
  static inline Codebook codebook{"iq1_m", 2048, kDims, kZero, kUnit, Signs::kOfPoint};

  static uint16_t d_of(const Block& block) {
    uint32_t d = 0;
    for (size_t i = 0; i < 4; ++i) d |= static_cast<uint32_t>(block.words[i][1] >> 4) << (4 * i);
    return static_cast<uint16_t>(d);
  }

  static void read(const Block& block, PointCodes& codes) {
    codes.d = d_of(block);
    for (size_t l = 0; l < 32; ++l) {
      const uint32_t nibble = block.high[l / 2] >> (l % 2 * 4) & 15;
      codes.index[l] = static_cast<uint16_t>(block.low[l] | (nibble & 7) << 8);
      codes.signs[l] = nibble & 8 ? 255 : 0;
    }
    for (size_t i = 0; i < 16; ++i) codes.scale[i] = load<uint16_t>(block.words[i / 4]) >> (i % 4 * 3) & 7;
  }

#if defined(__x86_64__)
  FEWBITS_AVX2_INLINE static void read_avx2(const Block& block, PointsAvx2<Iq1M>& into) {
    const __m256i nibbles_u8x32 =
        _mm256_set_m128i(nibbles_in_order(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(block.high + 8))),
                         nibbles_in_order(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(block.high))));
    const __m256i three_u8x32 = _mm256_and_si256(nibbles_u8x32, _mm256_set1_epi8(7)), shift_u8x32 = _mm256_set1_epi8(8);
    store_32(into.signs, shift_of(_mm256_cmpeq_epi8(_mm256_and_si256(nibbles_u8x32, shift_u8x32), shift_u8x32)));
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m128i here_u8x16 = half ? _mm256_extracti128_si256(three_u8x32, 1) : _mm256_castsi256_si128(three_u8x32);
      const __m256i high_u16x16 = _mm256_slli_epi16(_mm256_cvtepu8_epi16(here_u8x16), 8);
      store_32(into.index + 16 * half, _mm256_or_si256(wide_16(block.low + 16 * half), high_u16x16));
    }
    const __m256i s_u16x16 =
        _mm256_and_si256(_mm256_srli_epi16(threes_at_12(four_times(block.words[0])), 12), _mm256_set1_epi16(7));
    const float unit = _cvtsh_ss(d_of(block)) * kUnit;
    store_scales(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(s_u16x16)), unit, into.scale);
    store_scales(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(s_u16x16, 1)), unit, into.scale + 8);
  }
#endif
};

constexpr Layout s{"iq1_s", 256, {{"blocks", sizeof(Iq1S::Block)}}, {{"sub", 8}, {"shift", 8}, {"d", 2}}};
constexpr Layout m{"iq1_m", 256, {{"blocks", sizeof(Iq1M::Block)}}, {{"sub", 16}, {"d", 2}}};
CodebookReaders<Iq1S> s_readers{s, nullptr};
CodebookReaders<Iq1M> m_readers{m, nullptr};

}  // namespace
}  // namespace fewbits
