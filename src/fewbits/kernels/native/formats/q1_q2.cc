// GGUF's small blocks of one and two bits, neighbours in one byte: w = d * level, one float16 d.
#include "formats/reader_neon.h"
#include "formats/reader_x86.h"

namespace fewbits {
namespace {

// kWidth bits in each code.
template <size_t kWidth>
struct Block {
  uint8_t d[2];
  uint8_t codes[16];
};
static_assert(sizeof(Block<1>) == 18 && sizeof(Block<2>) == 18);

template <size_t kWidth>
void pack(const Layout&, const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  constexpr size_t kEach = 8 / kWidth;
  auto* block = reinterpret_cast<Block<kWidth>*>(parts[0]);
  for (size_t b = 0; b < cols / (16 * kEach); ++b, ++block, codes += 16 * kEach) {
    std::memcpy(block->d, grid[0] + 2 * b, 2);
    for (size_t l = 0; l < 16; ++l) {
      uint32_t byte = 0;
      for (size_t i = 0; i < kEach; ++i) byte |= static_cast<uint32_t>(codes[kEach * l + i]) << (kWidth * i);
      block->codes[l] = static_cast<uint8_t>(byte);
    }
  }
}

template <size_t kWidth>
struct Scalar {
  static constexpr size_t kBlock = 128 / kWidth, kRun = kBlock, kBytes = 18, kEach = 8 / kWidth;
  static constexpr int kBits = 2, kZero = 1;
  static constexpr bool kOffsets = false, kDoubled = kWidth == 1;
  const Block<kWidth>& block;

  Scalar(const Layout&, RowOf parts, size_t b) : block(reinterpret_cast<const Block<kWidth>*>(parts[0])[b]) {}
  const void* address() const { return &block; }
  void scales(float* scale, float*) const { *scale = float16_at(block.d); }
  uint8_t byte(size_t j) const {
    const int code = block.codes[j / kEach] >> (j % kEach * kWidth) & ((1 << kWidth) - 1);
    return static_cast<uint8_t>(kDoubled ? 2 * code : code);
  }
};

constexpr Layout one_bit{"q1_0", 128, {{"blocks", sizeof(Block<1>)}}, {{"d", 2}}};  // 1.125 bits; level -1 or 1: a byte is 0 or 2
constexpr Layout two_bits{"q2_0", 64, {{"blocks", sizeof(Block<2>)}}, {{"d", 2}}};  // 2.25 bits; level -1 to 2

#if defined(__x86_64__)
template <size_t kWidth>
struct Avx2 : Scalar<kWidth> {
  using Scalar<kWidth>::Scalar;
  FEWBITS_AVX2_INLINE void scales(float* scale, float*) const { *scale = float16_at_avx2(this->block.d); }
  FEWBITS_AVX2_INLINE void scale_lanes(__m256& scale, __m256&) const { scale = float16_lanes(this->block.d); }

  FEWBITS_AVX2_INLINE __m256i bytes(size_t i) const {
    if constexpr (kWidth == 1) {
      return _mm256_and_si256(spread_bits(load<uint32_t>(this->block.codes + 4 * i)), _mm256_set1_epi8(2));
    } else {  // four copies of a byte, each six bits further
      const __m128i eight_u8x8 = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(this->block.codes + 8 * i));
      const __m256i one_u32x8 = _mm256_cvtepu8_epi32(eight_u8x8);
      const __m256i two_u32x8 = _mm256_or_si256(one_u32x8, _mm256_slli_epi32(one_u32x8, 12));
      return _mm256_and_si256(_mm256_or_si256(two_u32x8, _mm256_slli_epi32(two_u32x8, 6)), _mm256_set1_epi8(3));
    }
  }
};
Readers<Scalar<1>, Avx2<1>> one_bit_readers{one_bit, pack<1>};
Readers<Scalar<2>, Avx2<2>> two_bits_readers{two_bits, pack<2>};
#elif defined(__aarch64__)
template <size_t kWidth>
struct Neon : Scalar<kWidth> {
  using Scalar<kWidth>::Scalar;
  FEWBITS_NEON_INLINE void scales(float* scale, float*) const { *scale = float16_at_neon(this->block.d); }

  FEWBITS_NEON_INLINE uint8x16x2_t bytes(size_t i) const {
    if constexpr (kWidth == 1) {
      return spread_bits(load<uint32_t>(this->block.codes + 4 * i), 2);
    } else {  // each byte four times, moved right by 0, 2, 4 and 6
      const uint8x8_t eight_u8x8 = vld1_u8(this->block.codes + 8 * i);
      const uint8x8_t twice_u8x8[2] = {vzip1_u8(eight_u8x8, eight_u8x8), vzip2_u8(eight_u8x8, eight_u8x8)};
      const int8x16_t right_i8x16 = vreinterpretq_s8_u32(vdupq_n_u32(0xfafcfe00));
      const auto sixteen = [&](size_t half) {
        const uint8x16_t four_u8x16 =
            vcombine_u8(vzip1_u8(twice_u8x8[half], twice_u8x8[half]), vzip2_u8(twice_u8x8[half], twice_u8x8[half]));
        return vandq_u8(vshlq_u8(four_u8x16, right_i8x16), vdupq_n_u8(3));
      };
      return {{sixteen(0), sixteen(1)}};
    }
  }
};
Readers<Scalar<1>, Neon<1>> one_bit_readers{one_bit, pack<1>};
Readers<Scalar<2>, Neon<2>> two_bits_readers{two_bits, pack<2>};
#else
Readers<Scalar<1>> one_bit_readers{one_bit, pack<1>};
Readers<Scalar<2>> two_bits_readers{two_bits, pack<2>};
#endif

}  // namespace
}  // namespace fewbits
