// GGUF's blocks of 256 ternary weights: w = d * (q - 1), one float16 d.
#include "formats/reader_neon.h"
#include "formats/reader_x86.h"

namespace fewbits {
namespace {

struct Shape {
  static constexpr size_t kBlock = 256, kRun = 256;
  static constexpr int kBits = 2, kZero = 1;
  static constexpr bool kOffsets = false;
};

namespace tq2_0 {

struct Block {     // 256 weights, 2.0625 bits each
  uint8_t qs[64];  // per 128 weights: byte l holds l, l + 32, l + 64, l + 96
  uint8_t d[2];    // float16
};
static_assert(sizeof(Block) == 66);

constexpr Layout layout{"tq2_0", 256, {{"blocks", sizeof(Block)}}, {{"d", 2}}};

void pack(const Layout&, const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  auto* block = reinterpret_cast<Block*>(parts[0]);
  for (size_t b = 0; b < cols / 256; ++b, ++block, codes += 256) {
    for (size_t l = 0; l < 64; ++l) {
      const uint8_t* q = codes + l / 32 * 128 + l % 32;
      block->qs[l] = static_cast<uint8_t>(q[0] | q[32] << 2 | q[64] << 4 | q[96] << 6);
    }
    std::memcpy(block->d, grid[0] + 2 * b, 2);
  }
}

struct Scalar : Shape {
  static constexpr size_t kBytes = sizeof(Block);
  const Block& block;

  Scalar(const Layout&, RowOf parts, size_t b) : block(reinterpret_cast<const Block*>(parts[0])[b]) {}
  const void* address() const { return &block; }
  void scales(float* scale, float*) const { *scale = float16_at(block.d); }
  uint8_t byte(size_t j) const { return block.qs[j / 128 * 32 + j % 32] >> (j % 128 / 32 * 2) & 3; }
};

#if defined(__x86_64__)
struct Avx2 : Scalar {
  using Scalar::Scalar;
  FEWBITS_AVX2_INLINE __m256i bytes(size_t i) const {
    return bits_of(load_32(block.qs + i / 4 * 32), static_cast<int>(i % 4 * 2), 2, 0);
  }
};
Readers<Scalar, Avx2> readers{layout, pack};
#elif defined(__aarch64__)
struct Neon : Scalar {
  using Scalar::Scalar;
  FEWBITS_NEON_INLINE uint8x16x2_t bytes(size_t i) const {
    return bits_of(load_32(block.qs + i / 4 * 32), static_cast<int>(i % 4 * 2), 2, 0);
  }
};
Readers<Scalar, Neon> readers{layout, pack};
#else
Readers<Scalar> readers{layout, pack};
#endif

}  // namespace tq2_0

namespace tq1_0 {

struct Block {  // 256 weights, 1.6875 bits each
  uint8_t
      five[48];  // five codes per byte: byte l of the first 32 holds l, l + 32 .. l + 128; of the other 16, 160 + l, 176 + l ..
  uint8_t four[4];  // byte l: 240 + l, 244 + l ..
  uint8_t d[2];     // float16
};
static_assert(sizeof(Block) == 54);

constexpr Layout layout{"tq1_0", 256, {{"blocks", sizeof(Block)}}, {{"d", 2}}};
constexpr uint8_t kPowers[5] = {1, 3, 9, 27, 81};

struct Place {
  size_t byte, digit;
};

constexpr Place place_of(size_t j) {
  if (j < 160) return {j % 32, j / 32};
  if (j < 240) return {32 + (j - 160) % 16, (j - 160) / 16};
  return {48 + (j - 240) % 4, (j - 240) / 4};
}

// A byte is a fixed-point fraction in base 3: each multiplication by 3 moves the next digit out of it.
uint8_t digit_of(uint8_t fraction, size_t digit) {
  return static_cast<uint8_t>(static_cast<uint8_t>(fraction * kPowers[digit]) * 3 >> 8);
}

void pack(const Layout&, const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  auto* block = reinterpret_cast<Block*>(parts[0]);
  for (size_t b = 0; b < cols / 256; ++b, ++block, codes += 256) {
    uint32_t number[52] = {};
    for (size_t j = 0; j < 256; ++j) number[place_of(j).byte] += codes[j] * kPowers[4 - place_of(j).digit];
    uint8_t bytes[52];
    for (size_t l = 0; l < 52; ++l) bytes[l] = static_cast<uint8_t>((number[l] * 256 + 242) / 243);
    std::memcpy(block->five, bytes, 48);
    std::memcpy(block->four, bytes + 48, 4);
    std::memcpy(block->d, grid[0] + 2 * b, 2);
  }
}

struct Scalar : Shape {
  static constexpr size_t kBytes = sizeof(Block);
  const Block& block;

  Scalar(const Layout&, RowOf parts, size_t b) : block(reinterpret_cast<const Block*>(parts[0])[b]) {}
  const void* address() const { return &block; }
  void scales(float* scale, float*) const { *scale = float16_at(block.d); }
  uint8_t byte(size_t j) const {
    const Place place = place_of(j);
    return digit_of(place.byte < 48 ? block.five[place.byte] : block.four[place.byte - 48], place.digit);
  }
};

#if defined(__x86_64__)
// Sixteen digits at once, in 16-bit lanes: the byte times a power of 3, modulo 256, times 3; the digit is the high byte.
FEWBITS_AVX2_INLINE __m256i digits(__m128i fractions_u8x16, __m256i powers_i16x16) {
  const __m256i wide_i16x16 = _mm256_mullo_epi16(_mm256_cvtepu8_epi16(fractions_u8x16), powers_i16x16);
  const __m256i fraction_i16x16 = _mm256_and_si256(wide_i16x16, _mm256_set1_epi16(255));
  return _mm256_srli_epi16(_mm256_mullo_epi16(fraction_i16x16, _mm256_set1_epi16(3)), 8);
}

struct Avx2 : Scalar {
  using Scalar::Scalar;

  FEWBITS_AVX2_INLINE __m256i bytes(size_t i) const {
    __m256i first_i16x16, second_i16x16;
    if (i < 5) {
      const __m256i power_i16x16 = _mm256_set1_epi16(kPowers[i]);
      first_i16x16 = digits(load_16(block.five), power_i16x16);
      second_i16x16 = digits(load_16(block.five + 16), power_i16x16);
    } else if (i < 7) {
      const __m128i fractions_u8x16 = load_16(block.five + 32);
      first_i16x16 = digits(fractions_u8x16, _mm256_set1_epi16(kPowers[2 * (i - 5)]));
      second_i16x16 = digits(fractions_u8x16, _mm256_set1_epi16(kPowers[2 * (i - 5) + 1]));
    } else {
      first_i16x16 = digits(load_16(block.five + 32), _mm256_set1_epi16(kPowers[4]));
      second_i16x16 = digits(_mm_set1_epi32(load<int32_t>(block.four)), _mm256_setr_epi16(1, 1, 1, 1, 3, 3, 3, 3,  //
                                                                                          9, 9, 9, 9, 27, 27, 27, 27));
    }
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(first_i16x16, second_i16x16), 0xd8);
  }
};
Readers<Scalar, Avx2> readers{layout, pack};
#elif defined(__aarch64__)
// Sixteen digits at once: the byte times a power of 3, modulo 256, times 3; the digit is the high byte.
FEWBITS_NEON_INLINE uint8x16_t digits(uint8x16_t fractions_u8x16, uint8x16_t powers_u8x16) {
  const uint8x16_t fraction_u8x16 = vmulq_u8(fractions_u8x16, powers_u8x16), three_u8x16 = vdupq_n_u8(3);
  const uint8x8_t low_u8x8 = vshrn_n_u16(vmull_u8(vget_low_u8(fraction_u8x16), vget_low_u8(three_u8x16)), 8);
  return vshrn_high_n_u16(low_u8x8, vmull_high_u8(fraction_u8x16, three_u8x16), 8);
}

struct Neon : Scalar {
  using Scalar::Scalar;

  FEWBITS_NEON_INLINE uint8x16x2_t bytes(size_t i) const {
    if (i < 5) {
      const uint8x16_t power_u8x16 = vdupq_n_u8(kPowers[i]);
      return {{digits(vld1q_u8(block.five), power_u8x16), digits(vld1q_u8(block.five + 16), power_u8x16)}};
    }
    const uint8x16_t fractions_u8x16 = vld1q_u8(block.five + 32);
    const size_t digit = 2 * (i - 5);
    const uint8x16_t first_u8x16 = digits(fractions_u8x16, vdupq_n_u8(kPowers[digit]));
    if (i < 7) return {{first_u8x16, digits(fractions_u8x16, vdupq_n_u8(kPowers[digit + 1]))}};
    constexpr uint8_t kByFours[16] = {1, 1, 1, 1, 3, 3, 3, 3, 9, 9, 9, 9, 27, 27, 27, 27};
    const uint8x16_t four_u8x16 = vreinterpretq_u8_u32(vdupq_n_u32(load<uint32_t>(block.four)));
    return {{first_u8x16, digits(four_u8x16, vld1q_u8(kByFours))}};
  }
};
Readers<Scalar, Neon> readers{layout, pack};
#else
Readers<Scalar> readers{layout, pack};
#endif

}  // namespace tq1_0

}  // namespace
}  // namespace fewbits
