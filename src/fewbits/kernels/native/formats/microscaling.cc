// Floats of 4 bits (e2m1) under 8-bit float scales: w = scale / 2 * level, the levels doubled to be integers. A byte is that
// + 12.
#include <limits>

#include "formats/reader_neon.h"
#include "formats/reader_x86.h"

namespace fewbits {
namespace {

alignas(16) constexpr uint8_t kLevels[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

struct Shape {
  static constexpr int kBits = 5, kZero = 12;
  static constexpr bool kOffsets = false, kSignedZeros = true;
  static constexpr const uint8_t* kLevelBytes = kLevels;
};

#if defined(__x86_64__)
FEWBITS_AVX2_INLINE __m256i where_eight(__m256i codes_u8x32) {
  return _mm256_and_si256(_mm256_cmpeq_epi8(codes_u8x32, _mm256_set1_epi8(8)), _mm256_set1_epi8(static_cast<char>(0x80)));
}
#elif defined(__aarch64__)
FEWBITS_NEON_INLINE uint8x16x2_t where_eight(uint8x16x2_t codes_u8x32) {
  const uint8x16_t eight_u8x16 = vdupq_n_u8(8), sign_u8x16 = vdupq_n_u8(0x80);
  return {{vandq_u8(vceqq_u8(codes_u8x32.val[0], eight_u8x16), sign_u8x16),
           vandq_u8(vceqq_u8(codes_u8x32.val[1], eight_u8x16), sign_u8x16)}};
}
#endif

namespace mxfp4 {

struct Block {          // 32 weights, 4.25 bits each
  uint8_t scale;        // E8M0: 2^(scale - 127); 255 is NaN
  uint8_t nibbles[16];  // byte j: element j low, j + 16 high
};
static_assert(sizeof(Block) == 17);

constexpr Layout layout{"mxfp4", 32, {{"blocks", sizeof(Block)}}, {{"scales", 1}}};

// Half of each scale; the two smallest are subnormal.
constexpr auto kHalves = [] {
  std::array<float, 256> halves{};
  for (uint32_t code = 0; code < 255; ++code)
    halves[code] = std::bit_cast<float>(code < 2 ? 0x00200000u << code : (code - 1) << 23);
  halves[255] = std::numeric_limits<float>::quiet_NaN();
  return halves;
}();

void pack(const Layout&, const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  auto* block = reinterpret_cast<Block*>(parts[0]);
  for (size_t b = 0; b < cols / 32; ++b, ++block, codes += 32) {
    block->scale = grid[0][b];
    for (size_t j = 0; j < 16; ++j) block->nibbles[j] = static_cast<uint8_t>(codes[j] | codes[j + 16] << 4);
  }
}

struct Reader : Shape {
  static constexpr size_t kBlock = 32, kRun = 32, kBytes = sizeof(Block);
  static constexpr Scales kScales = Scales::kExponent;
  const Block& block;

  Reader(const Layout&, RowOf parts, size_t b) : block(reinterpret_cast<const Block*>(parts[0])[b]) {}
  const void* address() const { return &block; }
  void scales(float* scale, float*) const { *scale = kHalves[block.scale]; }
};

struct Scalar : Reader {
  using Reader::Reader;
  int code(size_t j) const { return j < 16 ? block.nibbles[j] & 15 : block.nibbles[j - 16] >> 4; }
  uint8_t byte(size_t j) const { return kLevels[code(j)]; }
  bool minus_zero(size_t j) const { return code(j) == 8; }
};

#if defined(__x86_64__)
struct Avx2 : Reader {
  using Reader::Reader;
  FEWBITS_AVX2_INLINE void scale_lanes(__m256& scale, __m256&) const { scale = _mm256_broadcast_ss(&kHalves[block.scale]); }
  FEWBITS_AVX2_INLINE __m256i bytes(size_t) const { return look_up(kLevels, nibbles_by_half(block.nibbles)); }
  FEWBITS_AVX2_INLINE __m256i minus_zeros(size_t) const { return where_eight(nibbles_by_half(block.nibbles)); }
};
Readers<Scalar, Avx2> readers{layout, pack};
#elif defined(__aarch64__)
struct Neon : Reader {
  using Reader::Reader;
  FEWBITS_NEON_INLINE uint8x16x2_t bytes(size_t) const { return look_up(kLevels, nibbles_by_half(block.nibbles)); }
  FEWBITS_NEON_INLINE uint8x16x2_t minus_zeros(size_t) const { return where_eight(nibbles_by_half(block.nibbles)); }
};
Readers<Scalar, Neon> readers{layout, pack};
#else
Readers<Scalar> readers{layout, pack};
#endif

}  // namespace mxfp4

namespace nvfp4 {

struct Block {            // 64 weights, 4.5 bits each
  uint8_t scales[4];      // UE4M3, one per 16: e4m3 without its sign, which is ignored; 127 is NaN
  uint8_t nibbles[4][8];  // per 16: byte j holds element j low, j + 8 high
};
static_assert(sizeof(Block) == 36);

constexpr Layout plain{"nvfp4", 64, {{"blocks", sizeof(Block)}}, {{"scales", 4}}};
constexpr Layout with_factor{
    "nvfp4_tensor", 64, {{"blocks", sizeof(Block)}, {"factor", 0, 4}}, {{"scales", 4}, {"factor", 0, 4}}};

// Scale by scale byte, halved. A factor for the whole weight rounds after the scale, as the reference does.
constexpr auto kHalves = [] {
  std::array<float, 128> halves{};
  for (int code = 0; code < 127; ++code) {
    const int exponent = code / 8;
    float value = static_cast<float>(exponent ? 8 + code % 8 : code % 8) / 1024;  // 2^-10 for subnormals; halved
    for (int i = 1; i < exponent; ++i) value *= 2;
    halves[code] = value;
  }
  halves[127] = std::numeric_limits<float>::quiet_NaN();
  return halves;
}();

void pack(const Layout&, const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  auto* block = reinterpret_cast<Block*>(parts[0]);
  for (size_t b = 0; b < cols / 64; ++b, ++block, codes += 64) {
    std::memcpy(block->scales, grid[0] + 4 * b, 4);
    for (size_t run = 0; run < 4; ++run)
      for (size_t j = 0; j < 8; ++j)
        block->nibbles[run][j] = static_cast<uint8_t>(codes[16 * run + j] | codes[16 * run + j + 8] << 4);
  }
}

template <bool kFactor>
struct Reader : Shape {
  static constexpr size_t kBlock = 64, kRun = 16, kBytes = sizeof(Block);
  const Block& block;
  float factor;

  Reader(const Layout&, RowOf parts, size_t b)
      : block(reinterpret_cast<const Block*>(parts[0])[b]), factor(kFactor ? load<float>(parts[1]) : 1.0f) {}

  const void* address() const { return &block; }

  void scales(float* scale, float*) const {
    for (size_t i = 0; i < 4; ++i) {
      const float half = kHalves[block.scales[i] & 127];
      scale[i] = kFactor ? 2 * half * factor * 0.5f : half;
    }
  }
};

template <bool kFactor>
struct Scalar : Reader<kFactor> {
  using Reader<kFactor>::Reader;
  int code(size_t j) const { return this->block.nibbles[j / 16][j % 8] >> (j % 16 / 8 * 4) & 15; }
  uint8_t byte(size_t j) const { return kLevels[code(j)]; }
  bool minus_zero(size_t j) const { return code(j) == 8; }
};

#if defined(__x86_64__)
template <bool kFactor>
struct Avx2 : Reader<kFactor> {
  using Reader<kFactor>::Reader;
  FEWBITS_AVX2_INLINE __m256i codes(size_t i) const {
    const __m128i both_u8x16 = load_16(this->block.nibbles[2 * i]), nibble_u8x16 = _mm_set1_epi8(15);
    const __m128i low_u8x16 = _mm_and_si128(both_u8x16, nibble_u8x16);
    const __m128i high_u8x16 = _mm_and_si128(_mm_srli_epi16(both_u8x16, 4), nibble_u8x16);
    return _mm256_set_m128i(_mm_unpackhi_epi64(low_u8x16, high_u8x16), _mm_unpacklo_epi64(low_u8x16, high_u8x16));
  }

  FEWBITS_AVX2_INLINE __m256i bytes(size_t i) const { return look_up(kLevels, codes(i)); }
  FEWBITS_AVX2_INLINE __m256i minus_zeros(size_t i) const { return where_eight(codes(i)); }
};
Readers<Scalar<false>, Avx2<false>> readers{plain, pack};
Readers<Scalar<true>, Avx2<true>> readers_with_factor{with_factor, nullptr};
#elif defined(__aarch64__)
template <bool kFactor>
struct Neon : Reader<kFactor> {
  using Reader<kFactor>::Reader;
  FEWBITS_NEON_INLINE uint8x16x2_t codes(size_t i) const {
    const uint8x16x2_t half_u8x32 = nibbles_by_half(this->block.nibbles[2 * i]);
    const uint64x2_t low_u64x2 = vreinterpretq_u64_u8(half_u8x32.val[0]), high_u64x2 = vreinterpretq_u64_u8(half_u8x32.val[1]);
    return {{vreinterpretq_u8_u64(vzip1q_u64(low_u64x2, high_u64x2)), vreinterpretq_u8_u64(vzip2q_u64(low_u64x2, high_u64x2))}};
  }

  FEWBITS_NEON_INLINE uint8x16x2_t bytes(size_t i) const { return look_up(kLevels, codes(i)); }
  FEWBITS_NEON_INLINE uint8x16x2_t minus_zeros(size_t i) const { return where_eight(codes(i)); }
};
Readers<Scalar<false>, Neon<false>> readers{plain, pack};
Readers<Scalar<true>, Neon<true>> readers_with_factor{with_factor, nullptr};
#else
Readers<Scalar<false>> readers{plain, pack};
Readers<Scalar<true>> readers_with_factor{with_factor, nullptr};
#endif

}  // namespace nvfp4

}  // namespace
}  // namespace fewbits
