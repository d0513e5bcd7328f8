// GGUF's super-blocks of 256 with integer scales and minima: w = d * scale * q - dmin * min.
#include "formats/reader_neon.h"
#include "formats/reader_x86.h"

namespace fewbits {
namespace {

struct Shape {
  static constexpr size_t kBlock = 256;
  static constexpr int kZero = 0;
  static constexpr bool kOffsets = true;
};

namespace q2_k {

struct Block {         // 256 weights, 2.625 bits each, a scale and a min per 16
  uint8_t scales[16];  // scale low, min high
  uint8_t qs[64];      // per 128 weights: byte l holds l, l + 32, l + 64, l + 96
  uint8_t d[2];        // float16 scale of the scales
  uint8_t dmin[2];     // float16 scale of the mins
};
static_assert(sizeof(Block) == 84);

constexpr Layout layout{"q2_k", 256, {{"blocks", sizeof(Block)}}, {{"sub", 16}, {"sub_min", 16}, {"d", 2}, {"dmin", 2}}};

void pack(const Layout&, const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  auto* block = reinterpret_cast<Block*>(parts[0]);
  for (size_t b = 0; b < cols / 256; ++b, ++block, codes += 256) {
    for (size_t i = 0; i < 16; ++i) block->scales[i] = static_cast<uint8_t>(grid[0][16 * b + i] | grid[1][16 * b + i] << 4);
    for (size_t l = 0; l < 64; ++l) {
      const uint8_t* q = codes + l / 32 * 128 + l % 32;
      block->qs[l] = static_cast<uint8_t>(q[0] | q[32] << 2 | q[64] << 4 | q[96] << 6);
    }
    std::memcpy(block->d, grid[2] + 2 * b, 2);
    std::memcpy(block->dmin, grid[3] + 2 * b, 2);
  }
}

struct Reader : Shape {
  static constexpr size_t kRun = 16, kBytes = sizeof(Block);
  static constexpr int kBits = 2;
  static constexpr Scales kScales = Scales::kFourBits;
  const Block& block;

  Reader(const Layout&, RowOf parts, size_t b) : block(reinterpret_cast<const Block*>(parts[0])[b]) {}
  const void* address() const { return &block; }
};

struct Scalar : Reader {
  using Reader::Reader;

  void sub_scales(SubScales& into) const {
    into.d = load<uint16_t>(block.d);
    into.dmin = load<uint16_t>(block.dmin);
    for (size_t i = 0; i < 16; ++i) {
      into.sub[i] = static_cast<int8_t>(block.scales[i] & 15);
      into.min[i] = block.scales[i] >> 4;
    }
  }

  uint8_t byte(size_t j) const { return block.qs[j / 128 * 32 + j % 32] >> (j % 128 / 32 * 2) & 3; }
};

#if defined(__x86_64__)
struct Avx2 : Reader {
  using Reader::Reader;

  FEWBITS_AVX2_INLINE void scales(float* scale, float* offset) const {
    const __m128i both_u8x16 = load_16(block.scales), nibble_u8x16 = _mm_set1_epi8(15);
    const __m128i low_u8x16 = _mm_and_si128(both_u8x16, nibble_u8x16);
    const __m128i high_u8x16 = _mm_and_si128(_mm_srli_epi16(both_u8x16, 4), nibble_u8x16);
    const float d = float16_at_avx2(block.d), minus_dmin = -float16_at_avx2(block.dmin);
    scale_8_signed(low_u8x16, d, scale);
    scale_8_signed(_mm_unpackhi_epi64(low_u8x16, low_u8x16), d, scale + 8);
    scale_8_signed(high_u8x16, minus_dmin, offset);
    scale_8_signed(_mm_unpackhi_epi64(high_u8x16, high_u8x16), minus_dmin, offset + 8);
  }

  FEWBITS_AVX2_INLINE __m256i bytes(size_t i) const {
    return bits_of(load_32(block.qs + i / 4 * 32), static_cast<int>(i % 4 * 2), 2, 0);
  }
};
Readers<Scalar, Avx2> readers{layout, pack};
#elif defined(__aarch64__)
struct Neon : Reader {
  using Reader::Reader;

  FEWBITS_NEON_INLINE void scales(float* scale, float* offset) const {
    const uint8x16x2_t both_u8x32 = nibbles_by_half(block.scales);
    scale_16(vreinterpretq_s8_u8(both_u8x32.val[0]), float16_at_neon(block.d), scale);
    scale_16(vreinterpretq_s8_u8(both_u8x32.val[1]), -float16_at_neon(block.dmin), offset);
  }

  FEWBITS_NEON_INLINE uint8x16x2_t bytes(size_t i) const {
    return bits_of(load_32(block.qs + i / 4 * 32), static_cast<int>(i % 4 * 2), 2, 0);
  }
};
Readers<Scalar, Neon> readers{layout, pack};
#else
Readers<Scalar> readers{layout, pack};
#endif

}  // namespace q2_k

namespace q45_k {

template <bool kTop>
struct Block {                 // 256 weights, 4.5 or 5.5 bits each, a scale and a min per 32
  uint8_t d[2];                // float16 scale of the scales
  uint8_t dmin[2];             // float16 scale of the mins
  uint8_t scales[4];           // low six bits: scale i; top two: the top two of scale i + 4
  uint8_t mins[4];             // the same of the mins
  uint8_t rest[4];             // low nibble: the low four bits of scale i + 4; high nibble: those of min i + 4
  uint8_t top[kTop ? 32 : 0];  // bit i of byte l: fifth bit of element 32i + l
  uint8_t nibbles[128];        // per 64 weights: byte j holds element j low, j + 32 high
};
static_assert(sizeof(Block<false>) == 144 && sizeof(Block<true>) == 176);

constexpr Layout q4_k{"q4_k", 256, {{"blocks", 144}}, {{"sub", 8}, {"sub_min", 8}, {"d", 2}, {"dmin", 2}}};
constexpr Layout q5_k{"q5_k", 256, {{"blocks", 176}}, {{"sub", 8}, {"sub_min", 8}, {"d", 2}, {"dmin", 2}}};

template <bool kTop>
void pack(const Layout&, const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  auto* block = reinterpret_cast<Block<kTop>*>(parts[0]);
  const uint8_t *sub = grid[0], *sub_min = grid[1], *d = grid[2], *dmin = grid[3];
  for (size_t b = 0; b < cols / 256; ++b, ++block, codes += 256, sub += 8, sub_min += 8, d += 2, dmin += 2) {
    std::memcpy(block->d, d, 2);
    std::memcpy(block->dmin, dmin, 2);
    for (size_t i = 0; i < 4; ++i) {
      block->scales[i] = static_cast<uint8_t>(sub[i] | sub[i + 4] >> 4 << 6);
      block->mins[i] = static_cast<uint8_t>(sub_min[i] | sub_min[i + 4] >> 4 << 6);
      block->rest[i] = static_cast<uint8_t>((sub[i + 4] & 15) | (sub_min[i + 4] & 15) << 4);
    }
    if constexpr (kTop)
      for (size_t l = 0; l < 32; ++l) {
        uint8_t bits = 0;
        for (size_t i = 0; i < 8; ++i) bits |= static_cast<uint8_t>(codes[32 * i + l] >> 4 << i);
        block->top[l] = bits;
      }
    for (size_t j = 0; j < 128; ++j) {
      const uint8_t* low = codes + j / 32 * 64 + j % 32;
      block->nibbles[j] = static_cast<uint8_t>((low[0] & 15) | low[32] << 4);
    }
  }
}

template <bool kTop>
struct Reader : Shape {
  static constexpr size_t kRun = 32, kBytes = sizeof(Block<kTop>);
  static constexpr int kBits = kTop ? 5 : 4;
  static constexpr Scales kScales = Scales::kSixBits;
  const Block<kTop>& block;

  Reader(const Layout&, RowOf parts, size_t b) : block(reinterpret_cast<const Block<kTop>*>(parts[0])[b]) {}
  const void* address() const { return &block; }
};

template <bool kTop>
struct Scalar : Reader<kTop> {
  using Reader<kTop>::Reader;

  void sub_scales(SubScales& into) const {
    const auto& block = this->block;
    into.d = load<uint16_t>(block.d);
    into.dmin = load<uint16_t>(block.dmin);
    for (size_t i = 0; i < 8; ++i) {
      const int six = i < 4 ? block.scales[i] & 63 : (block.rest[i - 4] & 15) | block.scales[i - 4] >> 6 << 4;
      const int min = i < 4 ? block.mins[i] & 63 : block.rest[i - 4] >> 4 | block.mins[i - 4] >> 6 << 4;
      into.sub[i] = static_cast<int8_t>(six);
      into.min[i] = static_cast<uint8_t>(min);
    }
  }

  uint8_t byte(size_t j) const {
    const int low = this->block.nibbles[j / 64 * 32 + j % 32] >> (j / 32 % 2 * 4) & 15;
    if constexpr (kTop) return static_cast<uint8_t>(low | (this->block.top[j % 32] >> (j / 32) & 1) << 4);
    return static_cast<uint8_t>(low);
  }
};

#if defined(__x86_64__)
// out[0..7] = factor * the eight 6-bit integers whose four first are the low bits of `six`, and whose last are
// `rest` under the top two bits of `six`.
FEWBITS_AVX2_INLINE void six_bits(uint32_t six_u8x4, uint32_t rest_u8x4, float factor, float* out) {
  const uint32_t last_u8x4 = (rest_u8x4 & 0x0f0f0f0f) | (six_u8x4 >> 2 & 0x30303030);
  const uint64_t all_u8x8 = (six_u8x4 & 0x3f3f3f3f) | static_cast<uint64_t>(last_u8x4) << 32;
  scale_8_signed(_mm_cvtsi64_si128(static_cast<int64_t>(all_u8x8)), factor, out);
}

template <bool kTop>
struct Avx2 : Reader<kTop> {
  using Reader<kTop>::Reader;

  FEWBITS_AVX2_INLINE void scales(float* scale, float* offset) const {
    const auto& block = this->block;
    const uint32_t rest_u8x4 = load<uint32_t>(block.rest);
    six_bits(load<uint32_t>(block.scales), rest_u8x4, float16_at_avx2(block.d), scale);
    six_bits(load<uint32_t>(block.mins), rest_u8x4 >> 4, -float16_at_avx2(block.dmin), offset);
  }

  FEWBITS_AVX2_INLINE __m256i bytes(size_t i) const {
    const __m256i low_u8x32 = bits_of(load_32(this->block.nibbles + i / 2 * 32), static_cast<int>(i % 2 * 4), 4, 0);
    if constexpr (!kTop) return low_u8x32;
    return _mm256_or_si256(low_u8x32, bits_of(load_32(this->block.top), static_cast<int>(i), 1, 4));
  }
};
Readers<Scalar<false>, Avx2<false>> q4_k_readers{q4_k, pack<false>};
Readers<Scalar<true>, Avx2<true>> q5_k_readers{q5_k, pack<true>};
#elif defined(__aarch64__)
// out[0..7] = factor * the eight 6-bit integers whose four first are the low bits of `six`, and whose last are
// `rest` under the top two bits of `six`.
FEWBITS_NEON_INLINE void six_bits(uint32_t six_u8x4, uint32_t rest_u8x4, float factor, float* out) {
  const uint32_t last_u8x4 = (rest_u8x4 & 0x0f0f0f0f) | (six_u8x4 >> 2 & 0x30303030);
  scale_8((six_u8x4 & 0x3f3f3f3f) | static_cast<uint64_t>(last_u8x4) << 32, factor, out);
}

template <bool kTop>
struct Neon : Reader<kTop> {
  using Reader<kTop>::Reader;

  FEWBITS_NEON_INLINE void scales(float* scale, float* offset) const {
    const auto& block = this->block;
    const uint32_t rest_u8x4 = load<uint32_t>(block.rest);
    six_bits(load<uint32_t>(block.scales), rest_u8x4, float16_at_neon(block.d), scale);
    six_bits(load<uint32_t>(block.mins), rest_u8x4 >> 4, -float16_at_neon(block.dmin), offset);
  }

  FEWBITS_NEON_INLINE uint8x16x2_t bytes(size_t i) const {
    const uint8x16x2_t low_u8x32 = bits_of(load_32(this->block.nibbles + i / 2 * 32), static_cast<int>(i % 2 * 4), 4, 0);
    if constexpr (!kTop) return low_u8x32;
    return either(low_u8x32, bits_of(load_32(this->block.top), static_cast<int>(i), 1, 4));
  }
};
Readers<Scalar<false>, Neon<false>> q4_k_readers{q4_k, pack<false>};
Readers<Scalar<true>, Neon<true>> q5_k_readers{q5_k, pack<true>};
#else
Readers<Scalar<false>> q4_k_readers{q4_k, pack<false>};
Readers<Scalar<true>> q5_k_readers{q5_k, pack<true>};
#endif

}  // namespace q45_k

}  // namespace
}  // namespace fewbits
