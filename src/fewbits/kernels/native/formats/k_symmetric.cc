// GGUF's super-blocks of 256 whose sub-block scales are integers under one float16 d: w = d * scale * level.
#include "formats/reader_neon.h"
#include "formats/reader_x86.h"

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

void pack(const Layout&, const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  auto* block = reinterpret_cast<Block*>(parts[0]);
  const uint8_t *sub = grid[0], *d = grid[1];
  for (size_t b = 0; b < cols / 256; ++b, ++block, codes += 256, sub += 16, d += 2) {
    *block = {};
    for (size_t l = 0; l < 32; ++l) {
      uint8_t bits = 0;
      for (size_t i = 0; i < 8; ++i) bits |= static_cast<uint8_t>(codes[32 * i + l] >> 2 << i);
      block->hmask[l] = bits;
    }
    for (size_t l = 0; l < 64; ++l) {
      const uint8_t* q = codes + l / 32 * 128 + l % 32;
      block->qs[l] = static_cast<uint8_t>((q[0] & 3) | (q[32] & 3) << 2 | (q[64] & 3) << 4 | (q[96] & 3) << 6);
    }
    for (size_t i = 0; i < 16; ++i) {
      const uint8_t scale = static_cast<uint8_t>(sub[i] + 32);
      block->low[i % 8] |= static_cast<uint8_t>((scale & 15) << (i / 8 * 4));
      block->top[i % 4] |= static_cast<uint8_t>(scale >> 4 << (i / 4 * 2));
    }
    std::memcpy(block->d, d, 2);
  }
}

struct Reader {
  static constexpr size_t kBlock = 256, kRun = 16, kBytes = sizeof(Block);
  static constexpr int kBits = 3, kZero = 4, kSubZero = 32;
  static constexpr Scales kScales = Scales::kSixBits;
  static constexpr bool kOffsets = false;
  const Block& block;

  Reader(const Layout&, RowOf parts, size_t b) : block(reinterpret_cast<const Block*>(parts[0])[b]) {}
  const void* address() const { return &block; }
};

struct Scalar : Reader {
  using Reader::Reader;

  void sub_scales(SubScales& into) const {
    into.d = load<uint16_t>(block.d);
    for (size_t i = 0; i < 16; ++i) {
      const int low = i < 8 ? block.low[i] & 15 : block.low[i - 8] >> 4;
      into.sub[i] = static_cast<int8_t>((low | (block.top[i % 4] >> (i / 4 * 2) & 3) << 4) - kSubZero);
    }
  }

  uint8_t byte(size_t j) const {
    const int low = block.qs[j / 128 * 32 + j % 32] >> (j % 128 / 32 * 2) & 3;
    return static_cast<uint8_t>(low | (block.hmask[j % 32] >> (j / 32) & 1) << 2);
  }
};

#if defined(__x86_64__)
struct Avx2 : Reader {
  using Reader::Reader;

  FEWBITS_AVX2_INLINE void scales(float* scale, float*) const {
    const uint64_t low_u8x8 = load<uint64_t>(block.low), nibbles = 0x0f0f0f0f0f0f0f0f;
    const __m128i low_u8x16 =
        _mm_set_epi64x(static_cast<int64_t>(low_u8x8 >> 4 & nibbles), static_cast<int64_t>(low_u8x8 & nibbles));
    const __m128i top_u8x16 = _mm_srlv_epi32(_mm_set1_epi32(load<int32_t>(block.top)), _mm_setr_epi32(0, 2, 4, 6));
    const __m128i top_in_place_u8x16 = _mm_slli_epi32(_mm_and_si128(top_u8x16, _mm_set1_epi8(3)), 4);
    const __m128i scale_i8x16 = _mm_sub_epi8(_mm_or_si128(low_u8x16, top_in_place_u8x16), _mm_set1_epi8(32));
    const float d = float16_at_avx2(block.d);
    scale_8_signed(scale_i8x16, d, scale);
    scale_8_signed(_mm_unpackhi_epi64(scale_i8x16, scale_i8x16), d, scale + 8);
  }

  FEWBITS_AVX2_INLINE __m256i bytes(size_t i) const {
    const __m256i low_u8x32 = bits_of(load_32(block.qs + i / 4 * 32), static_cast<int>(i % 4 * 2), 2, 0);
    return _mm256_or_si256(low_u8x32, bits_of(load_32(block.hmask), static_cast<int>(i), 1, 2));
  }
};
Readers<Scalar, Avx2> readers{layout, pack};
#elif defined(__aarch64__)
struct Neon : Reader {
  using Reader::Reader;

  FEWBITS_NEON_INLINE void scales(float* scale, float*) const {
    const uint64_t low_u8x8 = load<uint64_t>(block.low), nibbles = 0x0f0f0f0f0f0f0f0f;
    const uint32_t top_u8x4 = load<uint32_t>(block.top), twos = 0x03030303;
    const uint64_t first_u8x8 = (top_u8x4 & twos) | static_cast<uint64_t>(top_u8x4 >> 2 & twos) << 32;
    const uint64_t last_u8x8 = (top_u8x4 >> 4 & twos) | static_cast<uint64_t>(top_u8x4 >> 6 & twos) << 32;
    const uint8x16_t scale_u8x16 =
        vcombine_u8(vcreate_u8((low_u8x8 & nibbles) | first_u8x8 << 4), vcreate_u8((low_u8x8 >> 4 & nibbles) | last_u8x8 << 4));
    scale_16(vreinterpretq_s8_u8(vsubq_u8(scale_u8x16, vdupq_n_u8(32))), float16_at_neon(block.d), scale);
  }

  FEWBITS_NEON_INLINE uint8x16x2_t bytes(size_t i) const {
    const uint8x16x2_t low_u8x32 = bits_of(load_32(block.qs + i / 4 * 32), static_cast<int>(i % 4 * 2), 2, 0);
    return either(low_u8x32, bits_of(load_32(block.hmask), static_cast<int>(i), 1, 2));
  }
};
Readers<Scalar, Neon> readers{layout, pack};
#else
Readers<Scalar> readers{layout, pack};
#endif

}  // namespace q3_k

namespace q6_k {

struct Block {         // 256 weights, 6.5625 bits each: w = d * scale * (q - 32), a scale per 16
  uint8_t low[128];    // per 128 weights: byte l of 64 holds the low four bits of l and l + 64
  uint8_t top[64];     // per 128 weights: byte l holds the top two bits of l, l + 32, l + 64, l + 96
  uint8_t scales[16];  // int8
  uint8_t d[2];        // float16 scale of the scales
};
static_assert(sizeof(Block) == 210);

constexpr Layout layout{"q6_k", 256, {{"blocks", sizeof(Block)}}, {{"sub", 16}, {"d", 2}}};

void pack(const Layout&, const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  auto* block = reinterpret_cast<Block*>(parts[0]);
  for (size_t b = 0; b < cols / 256; ++b, ++block, codes += 256) {
    for (size_t l = 0; l < 128; ++l) {
      const uint8_t* q = codes + l / 64 * 128 + l % 64;
      block->low[l] = static_cast<uint8_t>((q[0] & 15) | q[64] << 4);
    }
    for (size_t l = 0; l < 64; ++l) {
      const uint8_t* q = codes + l / 32 * 128 + l % 32;
      block->top[l] = static_cast<uint8_t>(q[0] >> 4 | q[32] >> 4 << 2 | q[64] >> 4 << 4 | q[96] >> 4 << 6);
    }
    std::memcpy(block->scales, grid[0] + 16 * b, 16);
    std::memcpy(block->d, grid[1] + 2 * b, 2);
  }
}

struct Reader {
  static constexpr size_t kBlock = 256, kRun = 16, kBytes = sizeof(Block);
  static constexpr int kBits = 6, kZero = 32;
  static constexpr Scales kScales = Scales::kEightBits;
  static constexpr bool kOffsets = false;
  const Block& block;

  Reader(const Layout&, RowOf parts, size_t b) : block(reinterpret_cast<const Block*>(parts[0])[b]) {}
  const void* address() const { return &block; }
};

struct Scalar : Reader {
  using Reader::Reader;

  void sub_scales(SubScales& into) const {
    into.d = load<uint16_t>(block.d);
    std::memcpy(into.sub, block.scales, 16);
  }

  uint8_t byte(size_t j) const {
    const int low = block.low[j / 128 * 64 + j % 64] >> (j % 128 / 64 * 4) & 15;
    return static_cast<uint8_t>(low | (block.top[j / 128 * 32 + j % 32] >> (j % 128 / 32 * 2) & 3) << 4);
  }
};

#if defined(__x86_64__)
struct Avx2 : Reader {
  using Reader::Reader;

  FEWBITS_AVX2_INLINE void scales(float* scale, float*) const {
    const __m128i scale_i8x16 = load_16(block.scales);
    const float d = float16_at_avx2(block.d);
    scale_8_signed(scale_i8x16, d, scale);
    scale_8_signed(_mm_unpackhi_epi64(scale_i8x16, scale_i8x16), d, scale + 8);
  }

  FEWBITS_AVX2_INLINE __m256i bytes(size_t i) const {
    const __m256i low_u8x32 = bits_of(load_32(block.low + i / 4 * 64 + i % 2 * 32), static_cast<int>(i % 4 / 2 * 4), 4, 0);
    return _mm256_or_si256(low_u8x32, bits_of(load_32(block.top + i / 4 * 32), static_cast<int>(i % 4 * 2), 2, 4));
  }
};
Readers<Scalar, Avx2> readers{layout, pack};
#elif defined(__aarch64__)
struct Neon : Reader {
  using Reader::Reader;

  FEWBITS_NEON_INLINE void scales(float* scale, float*) const {
    scale_16(vreinterpretq_s8_u8(vld1q_u8(block.scales)), float16_at_neon(block.d), scale);
  }

  FEWBITS_NEON_INLINE uint8x16x2_t bytes(size_t i) const {
    const uint8x16x2_t low_u8x32 = bits_of(load_32(block.low + i / 4 * 64 + i % 2 * 32), static_cast<int>(i % 4 / 2 * 4), 4, 0);
    return either(low_u8x32, bits_of(load_32(block.top + i / 4 * 32), static_cast<int>(i % 4 * 2), 2, 4));
  }
};
Readers<Scalar, Neon> readers{layout, pack};
#else
Readers<Scalar> readers{layout, pack};
#endif

}  // namespace q6_k

}  // namespace
}  // namespace fewbits
