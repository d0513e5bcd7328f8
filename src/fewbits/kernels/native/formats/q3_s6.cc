// A format of our own: 3-bit codes in one little-endian stream, 6-bit scales in another.
#include "formats/bitstream.h"
#include "formats/reader_neon.h"
#include "formats/reader_x86.h"

namespace fewbits {
namespace {

struct Block {        // 256 weights, 3.25 bits each: w = d * scale * (q - 4), a scale per 32
  uint8_t d[2];       // float16 scale of the scales
  uint8_t scales[6];  // eight 6-bit integers
  uint8_t codes[96];  // 3-bit codes
};
static_assert(sizeof(Block) == 104);

constexpr Layout layout{"q3_s6", 256, {{"blocks", sizeof(Block)}}, {{"sub", 8}, {"d", 2}}};

void pack(const Layout&, const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  auto* block = reinterpret_cast<Block*>(parts[0]);
  for (size_t b = 0; b < cols / 256; ++b, ++block, codes += 256) {
    std::memcpy(block->d, grid[1] + 2 * b, 2);
    pack_stream<6>(grid[0] + 8 * b, 8, block->scales);
    pack_stream<3>(codes, 256, block->codes);
  }
}

struct Scalar {
  static constexpr size_t kBlock = 256, kRun = 32, kBytes = sizeof(Block);
  static constexpr int kBits = 3, kZero = 4;
  static constexpr Scales kScales = Scales::kSixBits;
  static constexpr bool kOffsets = false;
  const Block& block;

  Scalar(const Layout&, RowOf parts, size_t b) : block(reinterpret_cast<const Block*>(parts[0])[b]) {}
  const void* address() const { return &block; }

  void sub_scales(SubScales& into) const {
    into.d = load<uint16_t>(block.d);
    for (size_t i = 0; i < 8; ++i) into.sub[i] = static_cast<int8_t>(stream_code<6>(block.scales, i));
  }

  uint8_t byte(size_t j) const { return stream_code<3>(block.codes, j); }
};

#if defined(__x86_64__)
struct Avx2 : Scalar {
  using Scalar::Scalar;

  FEWBITS_AVX2_INLINE void scales(float* scale, float*) const {
    uint64_t stream = 0, bytes = 0;
    std::memcpy(&stream, block.scales, sizeof block.scales);
    for (int i = 0; i < 8; ++i) bytes |= (stream >> (6 * i) & 63) << (8 * i);
    scale_8_signed(_mm_cvtsi64_si128(static_cast<int64_t>(bytes)), float16_at_avx2(block.d), scale);
  }

  FEWBITS_AVX2_INLINE __m256i bytes(size_t i) const { return stream_bytes<3>(block.codes + 12 * i); }
};
Readers<Scalar, Avx2> readers{layout, pack};
#elif defined(__aarch64__)
struct Neon : Scalar {
  using Scalar::Scalar;

  FEWBITS_NEON_INLINE void scales(float* scale, float*) const {
    uint64_t stream = 0, bytes = 0;
    std::memcpy(&stream, block.scales, sizeof block.scales);
    for (int i = 0; i < 8; ++i) bytes |= (stream >> (6 * i) & 63) << (8 * i);
    scale_8(bytes, float16_at_neon(block.d), scale);
  }

  FEWBITS_NEON_INLINE uint8x16x2_t bytes(size_t i) const { return stream_bytes<3>(block.codes + 12 * i); }
};
Readers<Scalar, Neon> readers{layout, pack};
#else
Readers<Scalar> readers{layout, pack};
#endif

}  // namespace
}  // namespace fewbits
