// reader.h for NEON. A format's reader gives 32 columns at once: uint8x16x2_t bytes(size_t i).
//
// NEON multiplies signed bytes by signed bytes, and in every format the difference of a byte and the zero fits a signed byte. So
// the zero is subtracted first, panels hold the difference, and no correction by sums of activations is needed.
#pragma once

#include "formats/reader.h"
#include "platform/neon.h"

#if defined(__aarch64__)
namespace fewbits {

namespace neon {

template <typename Reader>
FEWBITS_NEON_INLINE Reader block_at(const Layout& layout, RowOf parts, size_t block, size_t cols, uint8_t* padded) {
  if constexpr (Ragged<Reader>) {
    const size_t begin = block * Reader::kBlockBytes, end = (cols * Reader::kBlockBytes + Reader::kBlock - 1) / Reader::kBlock;
    if (begin + Reader::kBlockBytes <= end) return Reader(layout, parts, block, parts[0] + begin);
    std::memset(padded, 0, Reader::kBlockBytes);
    std::memcpy(padded, parts[0] + begin, end - begin);
    return Reader(layout, parts, block, padded);
  } else {
    return Reader(layout, parts, block);
  }
}

template <typename Reader>
FEWBITS_NEON_INLINE int8x16x2_t signed_bytes(const Reader& block, size_t i) {
  const uint8x16x2_t bytes_u8x32 = block.bytes(i);
  const uint8x16_t zero_u8x16 = vdupq_n_u8(Reader::kZero);
  return {{vreinterpretq_s8_u8(vsubq_u8(bytes_u8x32.val[0], zero_u8x16)),
           vreinterpretq_s8_u8(vsubq_u8(bytes_u8x32.val[1], zero_u8x16))}};
}

// A product and a sum, each rounded, not fused.
template <typename Reader>
FEWBITS_NEON_INLINE void decode_16(int8x16_t q_i8x16, float scale, float offset, float* out) {
  const Floats16 q = to_floats(q_i8x16);
  for (size_t i = 0; i < 4; ++i) {
    float32x4_t value_f32x4 = vmulq_n_f32(q.of[i], scale);
    if constexpr (Reader::kOffsets) value_f32x4 = vaddq_f32(value_f32x4, vdupq_n_f32(offset));
    vst1q_f32(out + 4 * i, value_f32x4);
  }
}

// Negates those of 16 zeros whose byte is 0x80. If the scale is NaN they are NaN, and stay so.
FEWBITS_NEON_INLINE void negate_zeros(uint8x16_t negative_u8x16, float* out) {
  const uint16x8_t low_u16x8 = vmovl_u8(vget_low_u8(negative_u8x16)), high_u16x8 = vmovl_high_u8(negative_u8x16);
  const uint32x4_t negative_u32x4[4] = {vmovl_u16(vget_low_u16(low_u16x8)), vmovl_high_u16(low_u16x8),
                                        vmovl_u16(vget_low_u16(high_u16x8)), vmovl_high_u16(high_u16x8)};
  for (size_t i = 0; i < 4; ++i) {
    const float32x4_t value_f32x4 = vld1q_f32(out + 4 * i);
    const uint32x4_t sign_u32x4 = vandq_u32(vshlq_n_u32(negative_u32x4[i], 24), vceqzq_f32(value_f32x4));
    vst1q_f32(out + 4 * i, vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(value_f32x4), sign_u32x4)));
  }
}

template <typename Reader>
void decode_row(const Layout& layout, RowOf parts, size_t cols, float* out, bool) {
  constexpr size_t kRun = std::min(Reader::kRun, Reader::kBlock);
  float scale[runs_of<Reader>()], offset[runs_of<Reader>()];
  uint8_t padded[Reader::kBlock];
  for (size_t b = 0; b < blocks_in<Reader>(cols); ++b) {
    const Reader block = block_at<Reader>(layout, parts, b, cols, padded);
    block.scales(scale, offset);
    float last[Reader::kBlock];
    const size_t first = b * Reader::kBlock;
    float* const into = first + Reader::kBlock <= cols ? out + first : last;
    for (size_t i = 0; i < Reader::kBlock / 32; ++i) {
      const int8x16x2_t q_i8x32 = signed_bytes(block, i);
      for (size_t half = 0; half < 2; ++half) {
        const size_t column = 32 * i + 16 * half, run = column / kRun;
        decode_16<Reader>(q_i8x32.val[half], scale[run], Reader::kOffsets ? offset[run] : 0.0f, into + column);
        if constexpr (SignedZeros<Reader>) negate_zeros(block.minus_zeros(i).val[half], into + column);
      }
    }
    if (into == last) std::copy_n(last, cols - first, out + first);
  }
}

// into[k][lane]: the k-th four bytes of four rows of 16.
FEWBITS_NEON_INLINE void transpose_4(const int8x16_t* rows_i8x16, uint8_t (*into)[kPanelRows][4]) {
  const auto fours = [&](size_t row) { return vreinterpretq_u32_s8(rows_i8x16[row]); };
  const uint64x2_t first_u64x2 = vreinterpretq_u64_u32(vtrn1q_u32(fours(0), fours(1))),
                   second_u64x2 = vreinterpretq_u64_u32(vtrn2q_u32(fours(0), fours(1))),
                   third_u64x2 = vreinterpretq_u64_u32(vtrn1q_u32(fours(2), fours(3))),
                   fourth_u64x2 = vreinterpretq_u64_u32(vtrn2q_u32(fours(2), fours(3)));
  const auto store = [&](size_t k, uint64x2_t four_rows_u64x2) { vst1q_u8(into[k][0], vreinterpretq_u8_u64(four_rows_u64x2)); };
  store(0, vtrn1q_u64(first_u64x2, third_u64x2));
  store(1, vtrn1q_u64(second_u64x2, fourth_u64x2));
  store(2, vtrn2q_u64(first_u64x2, third_u64x2));
  store(3, vtrn2q_u64(second_u64x2, fourth_u64x2));
}

template <typename Reader>
void fill_panel(const Layout& layout, PanelRows rows, size_t first_column, size_t columns, size_t cols, Panel& panel) {
  constexpr size_t kUnit = Reader::kRun == 16 ? 16 : 32, kHalves = Reader::kBlock / 16;
  float scale[runs_of<Reader>()], offset[runs_of<Reader>()];
  uint8_t padded[Reader::kBlock];
  int8x16_t halves_i8x16[kHalves][4];
  for (size_t start = 0; start < columns; start += Reader::kBlock) {
    const size_t block_number = (first_column + start) / Reader::kBlock;
    for (size_t four = 0; four < kPanelRows; four += 4) {
      for (size_t lane = 0; lane < 4; ++lane) {
        const size_t row = four + lane;
        const Reader block = block_at<Reader>(layout, rows[row].data(), block_number, cols, padded);
        block.scales(scale, offset);
        for (size_t unit = 0; unit < Reader::kBlock / kUnit; ++unit) {
          panel.scale[start / kUnit + unit][row] = scale[run_of<Reader>(unit)];
          if constexpr (Reader::kOffsets) panel.offset[start / kUnit + unit][row] = offset[run_of<Reader>(unit)];
        }
        for (size_t i = 0; i < kHalves / 2; ++i) {
          const int8x16x2_t q_i8x32 = signed_bytes(block, i);
          halves_i8x16[2 * i][lane] = q_i8x32.val[0];
          halves_i8x16[2 * i + 1][lane] = q_i8x32.val[1];
        }
      }
      for (size_t i = 0; i < kHalves; ++i)
        transpose_4(halves_i8x16[i], reinterpret_cast<uint8_t (*)[kPanelRows][4]>(&panel.bytes[(start + 16 * i) / 4][four]));
    }
  }
}

}  // namespace neon

namespace neon_dotprod {
#define FEWBITS_ISA FEWBITS_DOTPROD
#define FEWBITS_ISA_INLINE FEWBITS_DOTPROD FEWBITS_NEON_INLINE
#include "formats/reader_neon.inc"
#undef FEWBITS_ISA
#undef FEWBITS_ISA_INLINE
}  // namespace neon_dotprod

namespace neon_plain {
#define FEWBITS_ISA
#define FEWBITS_ISA_INLINE FEWBITS_NEON_INLINE
#include "formats/reader_neon.inc"
#undef FEWBITS_ISA
#undef FEWBITS_ISA_INLINE
}  // namespace neon_plain

template <typename Scalar, typename Neon>
struct Readers<Scalar, Neon> {
  Kernel scalar, neon;

  Readers(const Layout& layout, PackRow pack_row)
      : scalar(layout, "scalar", runs_everywhere, scalar_functions<Scalar>(pack_row)),
        neon(layout, "neon", runs_everywhere, has_dotprod() ? neon_dotprod::functions<Neon>() : neon_plain::functions<Neon>()) {}
};

}  // namespace fewbits
#endif
