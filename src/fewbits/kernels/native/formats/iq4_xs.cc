// iq4_nl's uneven levels in super-blocks of 256: w = d * scale * level. A byte is the level + 127.
#include "formats/reader_neon.h"
#include "formats/reader_x86.h"

namespace fewbits {
namespace {

struct Block {             // 256 weights, 4.25 bits each, a scale per 32
  uint8_t d[2];            // float16 scale of the scales
  uint8_t scale_top[2];    // two bits each, the first scale lowest
  uint8_t scale_low[4];    // nibbles, the even scale low; a scale is stored + 32
  uint8_t nibbles[8][16];  // per 32: byte j holds element j low, j + 16 high
};
static_assert(sizeof(Block) == 136);

constexpr Layout layout{"iq4_xs", 256, {{"blocks", sizeof(Block)}}, {{"sub", 8}, {"d", 2}}};
alignas(16) constexpr uint8_t kLevels[16] = {0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240};

void pack(const Layout&, const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  auto* block = reinterpret_cast<Block*>(parts[0]);
  const uint8_t *sub = grid[0], *d = grid[1];
  for (size_t b = 0; b < cols / 256; ++b, ++block, codes += 256, sub += 8, d += 2) {
    std::memcpy(block->d, d, 2);
    uint32_t low = 0, top = 0;
    for (size_t i = 0; i < 8; ++i) {
      const uint32_t scale = static_cast<uint8_t>(sub[i] + 32);
      low |= (scale & 15) << (4 * i);
      top |= (scale >> 4) << (2 * i);
    }
    std::memcpy(block->scale_low, &low, 4);
    std::memcpy(block->scale_top, &top, 2);
    for (size_t run = 0; run < 8; ++run)
      for (size_t j = 0; j < 16; ++j)
        block->nibbles[run][j] = static_cast<uint8_t>(codes[32 * run + j] | codes[32 * run + j + 16] << 4);
  }
}

struct Reader {
  static constexpr size_t kBlock = 256, kRun = 32, kBytes = sizeof(Block);
  static constexpr int kBits = 8, kZero = 127, kSubZero = 32;
  static constexpr Scales kScales = Scales::kSixBits;
  static constexpr const uint8_t* kLevelBytes = kLevels;
  static constexpr bool kOffsets = false;
  const Block& block;

  Reader(const Layout&, RowOf parts, size_t b) : block(reinterpret_cast<const Block*>(parts[0])[b]) {}
  const void* address() const { return &block; }
};

struct Scalar : Reader {
  using Reader::Reader;

  void sub_scales(SubScales& into) const {
    into.d = load<uint16_t>(block.d);
    const uint32_t low = load<uint32_t>(block.scale_low), top = load<uint16_t>(block.scale_top);
    for (size_t i = 0; i < 8; ++i)
      into.sub[i] = static_cast<int8_t>(static_cast<int>((low >> (4 * i) & 15) | (top >> (2 * i) & 3) << 4) - kSubZero);
  }

  uint8_t byte(size_t j) const { return kLevels[block.nibbles[j / 32][j % 16] >> (j % 32 / 16 * 4) & 15]; }
};

#if defined(__x86_64__)
struct Avx2 : Reader {
  using Reader::Reader;

  FEWBITS_AVX2_INLINE void scales(float* scale, float*) const {
    const __m256i low_i32x8 =
        _mm256_srlv_epi32(_mm256_set1_epi32(load<int32_t>(block.scale_low)), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    const __m256i top_i32x8 =
        _mm256_srlv_epi32(_mm256_set1_epi32(load<uint16_t>(block.scale_top)), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
    const __m256i scale_i32x8 = _mm256_or_si256(_mm256_and_si256(low_i32x8, _mm256_set1_epi32(15)),
                                                _mm256_slli_epi32(_mm256_and_si256(top_i32x8, _mm256_set1_epi32(3)), 4));
    const __m256 scale_f32x8 = _mm256_cvtepi32_ps(_mm256_sub_epi32(scale_i32x8, _mm256_set1_epi32(32)));
    _mm256_storeu_ps(scale, _mm256_mul_ps(scale_f32x8, _mm256_set1_ps(float16_at_avx2(block.d))));
  }

  FEWBITS_AVX2_INLINE __m256i bytes(size_t i) const { return look_up(kLevels, nibbles_by_half(block.nibbles[i])); }
};
Readers<Scalar, Avx2> readers{layout, pack};
#elif defined(__aarch64__)
struct Neon : Reader {
  using Reader::Reader;

  FEWBITS_NEON_INLINE void scales(float* scale, float*) const {
    constexpr int32_t kLow[8] = {0, -4, -8, -12, -16, -20, -24, -28}, kTop[8] = {0, -2, -4, -6, -8, -10, -12, -14};
    const uint32x4_t low_u32x4 = vdupq_n_u32(load<uint32_t>(block.scale_low)),
                     top_u32x4 = vdupq_n_u32(load<uint16_t>(block.scale_top));
    const float d = float16_at_neon(block.d);
    for (size_t i = 0; i < 8; i += 4) {
      const uint32x4_t here_u32x4 = vandq_u32(vshlq_u32(low_u32x4, vld1q_s32(kLow + i)), vdupq_n_u32(15));
      const uint32x4_t above_u32x4 = vandq_u32(vshlq_u32(top_u32x4, vld1q_s32(kTop + i)), vdupq_n_u32(3));
      const int32x4_t scale_i32x4 = vreinterpretq_s32_u32(vorrq_u32(here_u32x4, vshlq_n_u32(above_u32x4, 4)));
      vst1q_f32(scale + i, vmulq_n_f32(vcvtq_f32_s32(vsubq_s32(scale_i32x4, vdupq_n_s32(32))), d));
    }
  }

  FEWBITS_NEON_INLINE uint8x16x2_t bytes(size_t i) const { return look_up(kLevels, nibbles_by_half(block.nibbles[i])); }
};
Readers<Scalar, Neon> readers{layout, pack};
#else
Readers<Scalar> readers{layout, pack};
#endif

}  // namespace
}  // namespace fewbits
