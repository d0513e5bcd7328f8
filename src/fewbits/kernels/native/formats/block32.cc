// GGUF's blocks of 32 with one float16 scale, some with a float16 minimum: w = d * q + m.
#include "formats/reader_neon.h"
#include "formats/reader_x86.h"

namespace fewbits {
namespace {

// The blocks differ in whether they have a minimum, a fifth bit, whole bytes.
template <bool kMin, bool kTop>
struct Nibbles {
  uint8_t d[2];
  uint8_t m[kMin ? 2 : 0];
  uint8_t top[kTop ? 4 : 0];  // bit j % 8 of byte j / 8: fifth bit of element j
  uint8_t nibbles[16];        // byte j: element j low, j + 16 high
};

template <bool kMin, bool kTop>
void pack_nibbles(const Layout&, const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  auto* block = reinterpret_cast<Nibbles<kMin, kTop>*>(parts[0]);
  for (size_t b = 0; b < cols / 32; ++b, ++block, codes += 32) {
    std::memcpy(block->d, grid[0] + 2 * b, 2);
    if constexpr (kMin) std::memcpy(block->m, grid[1] + 2 * b, 2);
    if constexpr (kTop) {
      uint32_t top = 0;
      for (size_t j = 0; j < 32; ++j) top |= static_cast<uint32_t>(codes[j] >> 4) << j;
      std::memcpy(block->top, &top, 4);
    }
    for (size_t j = 0; j < 16; ++j) block->nibbles[j] = static_cast<uint8_t>((codes[j] & 15) | codes[j + 16] << 4);
  }
}

template <bool kMin, bool kTop>
struct NibbleShape {
  using Block = Nibbles<kMin, kTop>;
  static constexpr size_t kBlock = 32, kRun = 32, kBytes = sizeof(Block);
  static constexpr int kBits = kTop ? 5 : 4, kZero = kMin ? 0 : kTop ? 16 : 8;
  static constexpr bool kOffsets = kMin;
  const Block& block;

  NibbleShape(const Layout&, RowOf parts, size_t b) : block(reinterpret_cast<const Block*>(parts[0])[b]) {}
  const void* address() const { return &block; }
};

template <bool kMin, bool kTop>
struct NibblesScalar : NibbleShape<kMin, kTop> {
  using NibbleShape<kMin, kTop>::NibbleShape;

  void scales(float* scale, float* offset) const {
    *scale = float16_at(this->block.d);
    if constexpr (kMin) *offset = float16_at(this->block.m);
  }

  uint8_t byte(size_t j) const {
    const uint8_t low = j < 16 ? this->block.nibbles[j] & 15 : this->block.nibbles[j - 16] >> 4;
    if constexpr (kTop) return static_cast<uint8_t>(low | (this->block.top[j / 8] >> (j % 8) & 1) << 4);
    return low;
  }
};

#if defined(__x86_64__)
template <bool kMin, bool kTop>
struct NibblesAvx2 : NibbleShape<kMin, kTop> {
  using NibbleShape<kMin, kTop>::NibbleShape;

  FEWBITS_AVX2_INLINE void scales(float* scale, float* offset) const {
    *scale = float16_at_avx2(this->block.d);
    if constexpr (kMin) *offset = float16_at_avx2(this->block.m);
  }

  FEWBITS_AVX2_INLINE void scale_lanes(__m256& scale, __m256& offset) const {
    scale = float16_lanes(this->block.d);
    if constexpr (kMin) offset = float16_lanes(this->block.m);
  }

  FEWBITS_AVX2_INLINE __m256i bytes(size_t) const {
    const __m256i low_u8x32 = nibbles_by_half(this->block.nibbles);
    if constexpr (!kTop) return low_u8x32;
    const __m256i top_u8x32 = _mm256_and_si256(spread_bits(load<uint32_t>(this->block.top)), _mm256_set1_epi8(16));
    return _mm256_or_si256(low_u8x32, top_u8x32);
  }
};
template <bool kMin, bool kTop>
using NibbleReaders = Readers<NibblesScalar<kMin, kTop>, NibblesAvx2<kMin, kTop>>;
#elif defined(__aarch64__)
template <bool kMin, bool kTop>
struct NibblesNeon : NibbleShape<kMin, kTop> {
  using NibbleShape<kMin, kTop>::NibbleShape;

  FEWBITS_NEON_INLINE void scales(float* scale, float* offset) const {
    *scale = float16_at_neon(this->block.d);
    if constexpr (kMin) *offset = float16_at_neon(this->block.m);
  }

  FEWBITS_NEON_INLINE uint8x16x2_t bytes(size_t) const {
    const uint8x16x2_t low_u8x32 = nibbles_by_half(this->block.nibbles);
    if constexpr (!kTop) return low_u8x32;
    return either(low_u8x32, spread_bits(load<uint32_t>(this->block.top), 16));
  }
};
template <bool kMin, bool kTop>
using NibbleReaders = Readers<NibblesScalar<kMin, kTop>, NibblesNeon<kMin, kTop>>;
#else
template <bool kMin, bool kTop>
using NibbleReaders = Readers<NibblesScalar<kMin, kTop>>;
#endif

constexpr Layout q4_0{"q4_0", 32, {{"blocks", 18}}, {{"d", 2}}};
constexpr Layout q4_1{"q4_1", 32, {{"blocks", 20}}, {{"d", 2}, {"m", 2}}};
constexpr Layout q5_0{"q5_0", 32, {{"blocks", 22}}, {{"d", 2}}};
constexpr Layout q5_1{"q5_1", 32, {{"blocks", 24}}, {{"d", 2}, {"m", 2}}};
NibbleReaders<false, false> q4_0_readers{q4_0, pack_nibbles<false, false>};
NibbleReaders<true, false> q4_1_readers{q4_1, pack_nibbles<true, false>};
NibbleReaders<false, true> q5_0_readers{q5_0, pack_nibbles<false, true>};
NibbleReaders<true, true> q5_1_readers{q5_1, pack_nibbles<true, true>};

namespace iq4_nl {  // q4_0's layout, the nibble an index into uneven levels; a byte is the level + 127

constexpr Layout layout{"iq4_nl", 32, {{"blocks", 18}}, {{"d", 2}}};
alignas(16) constexpr uint8_t kLevels[16] = {0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240};

struct Scalar : NibblesScalar<false, false> {
  static constexpr int kBits = 8, kZero = 127;
  static constexpr const uint8_t* kLevelBytes = kLevels;
  using NibblesScalar::NibblesScalar;
  uint8_t byte(size_t j) const { return kLevels[NibblesScalar::byte(j)]; }
};

#if defined(__x86_64__)
struct Avx2 : NibblesAvx2<false, false> {
  static constexpr int kBits = 8, kZero = 127;
  static constexpr const uint8_t* kLevelBytes = kLevels;
  using NibblesAvx2::NibblesAvx2;
  FEWBITS_AVX2_INLINE __m256i bytes(size_t i) const { return look_up(kLevels, NibblesAvx2::bytes(i)); }
};
Readers<Scalar, Avx2> readers{layout, pack_nibbles<false, false>};
#elif defined(__aarch64__)
struct Neon : NibblesNeon<false, false> {
  static constexpr int kBits = 8, kZero = 127;
  static constexpr const uint8_t* kLevelBytes = kLevels;
  using NibblesNeon::NibblesNeon;
  FEWBITS_NEON_INLINE uint8x16x2_t bytes(size_t i) const { return look_up(kLevels, NibblesNeon::bytes(i)); }
};
Readers<Scalar, Neon> readers{layout, pack_nibbles<false, false>};
#else
Readers<Scalar> readers{layout, pack_nibbles<false, false>};
#endif

}  // namespace iq4_nl

namespace q8_0 {

struct Block {    // 32 weights, 8.5 bits each
  uint8_t d[2];   // float16 scale
  uint8_t q[32];  // int8
};
static_assert(sizeof(Block) == 34);

constexpr Layout layout{"q8_0", 32, {{"blocks", sizeof(Block)}}, {{"d", 2}}};

void pack(const Layout&, const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  auto* block = reinterpret_cast<Block*>(parts[0]);
  for (size_t b = 0; b < cols / 32; ++b, ++block, codes += 32) {
    std::memcpy(block->d, grid[0] + 2 * b, 2);
    for (size_t j = 0; j < 32; ++j) block->q[j] = codes[j] ^ 0x80;  // code 0 is level -128
  }
}

struct Shape {
  static constexpr size_t kBlock = 32, kRun = 32, kBytes = sizeof(Block);
  static constexpr int kBits = 8, kZero = 128;
  static constexpr bool kOffsets = false;
  const Block& block;

  Shape(const Layout&, RowOf parts, size_t b) : block(reinterpret_cast<const Block*>(parts[0])[b]) {}
  const void* address() const { return &block; }
};

struct Scalar : Shape {
  using Shape::Shape;
  void scales(float* scale, float*) const { *scale = float16_at(block.d); }
  uint8_t byte(size_t j) const { return block.q[j] ^ 0x80; }
};

#if defined(__x86_64__)
struct Avx2 : Shape {
  using Shape::Shape;
  FEWBITS_AVX2_INLINE void scales(float* scale, float*) const { *scale = float16_at_avx2(block.d); }
  FEWBITS_AVX2_INLINE void scale_lanes(__m256& scale, __m256&) const { scale = float16_lanes(block.d); }
  FEWBITS_AVX2_INLINE __m256i bytes(size_t) const {
    return _mm256_xor_si256(load_32(block.q), _mm256_set1_epi8(static_cast<char>(0x80)));
  }
};
Readers<Scalar, Avx2> readers{layout, pack};
#elif defined(__aarch64__)
struct Neon : Shape {
  using Shape::Shape;
  FEWBITS_NEON_INLINE void scales(float* scale, float*) const { *scale = float16_at_neon(block.d); }
  FEWBITS_NEON_INLINE uint8x16x2_t bytes(size_t) const {
    const uint8x16x2_t q_i8x32 = load_32(block.q);
    const uint8x16_t sign_u8x16 = vdupq_n_u8(0x80);
    return {{veorq_u8(q_i8x32.val[0], sign_u8x16), veorq_u8(q_i8x32.val[1], sign_u8x16)}};
  }
};
Readers<Scalar, Neon> readers{layout, pack};
#else
Readers<Scalar> readers{layout, pack};
#endif

}  // namespace q8_0

}  // namespace
}  // namespace fewbits
