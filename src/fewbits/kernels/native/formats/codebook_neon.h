// codebook.h for NEON: indices and signs as the scalar reader has them, 32 columns looked up at a time.
#pragma once

#include "formats/codebook.h"
#include "formats/reader_neon.h"

#if defined(__aarch64__)
namespace fewbits {

template <typename Format>
struct CodebookNeon : CodebookScalar<Format> {
  using CodebookScalar<Format>::CodebookScalar;

  FEWBITS_NEON_INLINE uint8x16x2_t bytes(size_t i) const {
    const uint8x16x2_t bytes_u8x32{{vcombine_u8(line(4 * i), line(4 * i + 1)), vcombine_u8(line(4 * i + 2), line(4 * i + 3))}};
    const uint32_t signs = load<uint32_t>(this->codes.signs + 4 * i);
    if constexpr (Format::kShifts) {
      const uint8x16x2_t down_u8x32 = spread_bits(signs, 2);
      const auto moved = [&](int k) { return vsubq_u8(vaddq_u8(bytes_u8x32.val[k], vdupq_n_u8(1)), down_u8x32.val[k]); };
      return {{moved(0), moved(1)}};
    } else {
      const uint8x16x2_t negative_u8x32 = spread_bits(signs, 255);
      const uint8x16_t zero_u8x16 = vdupq_n_u8(Format::kZero);
      const auto signed_of = [&](int k) {
        return vbslq_u8(negative_u8x32.val[k], vsubq_u8(zero_u8x16, bytes_u8x32.val[k]),
                        vaddq_u8(zero_u8x16, bytes_u8x32.val[k]));
      };
      return {{signed_of(0), signed_of(1)}};
    }
  }

 private:
  // Eight columns: one point, or two.
  FEWBITS_NEON_INLINE uint8x8_t line(size_t l) const {
    const uint8_t* const grid = Format::codebook.bytes;
    if constexpr (Format::kDims == 8) {
      return vld1_u8(grid + 8 * this->codes.index[l]);
    } else {
      const uint64_t first = load<uint32_t>(grid + 4 * this->codes.index[2 * l]);
      return vcreate_u8(first | static_cast<uint64_t>(load<uint32_t>(grid + 4 * this->codes.index[2 * l + 1])) << 32);
    }
  }
};

}  // namespace fewbits
#endif
