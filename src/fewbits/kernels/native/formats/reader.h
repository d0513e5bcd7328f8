// A format only has to provide a reader, which turns a block of a row into bytes, scales and offsets:
//
//     w = scale[group] * (byte - kZero) + offset[group]
//
// From it these templates make the decoder, the product of one row and the panels for products of many rows. A reader is
//
//     struct Scalar {
//       static constexpr size_t kBlock, kRun;
//       static constexpr int kBits, kZero;
//       static constexpr bool kOffsets;
//       Scalar(const Layout&, RowOf parts, size_t block);
//       void scales(float* scale, float* offset) const;
//       uint8_t byte(size_t j) const;
//     };
//
// kBlock: columns of a block, a multiple of 32. kRun: columns under one scale (a group), 16, or 32 and more; `scales` gives one
// for each group of the block. Bytes are below 2^kBits; `byte` gives that of column j of the block. If scales are integers under
// one float16, `sub_scales(SubScales&)` replaces `scales`. What else bytes_of asks for is optional.
//
// and a second one for AVX2, which gives 32 columns at once: __m256i bytes(size_t i).
#pragma once

#include <algorithm>

#include "kernels.h"

namespace fewbits {

// Formats with a scale for the whole row may end inside a block. Their readers take the address of the codes separately from the
// other arrays, so that an incomplete last block can be read from a padded copy.
template <typename Reader>
concept Ragged = requires { Reader::kBlockBytes; };

// Float formats distinguish zero from minus zero, which integers do not: decoding asks for the sign, products do not need it.
template <typename Reader>
concept SignedZeros = requires { Reader::kSignedZeros; };

template <typename Reader>
constexpr size_t runs_of() {
  return std::max<size_t>(1, Reader::kBlock / Reader::kRun);
}

template <typename Reader>
constexpr ByteTraits bytes_of() {
  ByteTraits bytes{Reader::kBits, Reader::kZero, Reader::kRun == 16, Reader::kOffsets, Reader::kRun};
  if constexpr (requires { Reader::kLevelBytes; }) bytes.levels = Reader::kLevelBytes;
  if constexpr (requires { Reader::kScales; }) bytes.scales = Reader::kScales;
  if constexpr (requires { Reader::kSubZero; }) bytes.sub_zero = Reader::kSubZero;
  if constexpr (requires { Reader::kZeroPoints; }) bytes.zero_points = Reader::kZeroPoints;
  if constexpr (requires { Reader::kDoubled; }) bytes.doubled = Reader::kDoubled;
  if constexpr (requires { Reader::codebook(); }) bytes.codebook = Reader::codebook();
  return bytes;
}

// Formats whose scales are integers under one float16: the scalar reader gives the integers, from which floats are computed.
template <typename Reader>
concept Nested = requires(const Reader& block, SubScales& into) { block.sub_scales(into); };

template <typename Reader>
void scales_of(const Reader& block, float* scale, float* offset) {
  if constexpr (Nested<Reader>) {
    SubScales sub;
    block.sub_scales(sub);
    const float d = float_of(sub.d), dmin = float_of(sub.dmin);
    for (size_t i = 0; i < runs_of<Reader>(); ++i) {
      scale[i] = d * static_cast<float>(sub.sub[i]);
      if constexpr (Reader::kOffsets) offset[i] = -(dmin * static_cast<float>(sub.min[i]));
    }
  } else {
    block.scales(scale, offset);
  }
}

template <typename Reader>
void sub_scales_at(const Layout& layout, RowOf parts, size_t block, SubScales& into) {
  Reader(layout, parts, block).sub_scales(into);
}

template <typename Reader>
void point_codes_at(const Layout& layout, RowOf parts, size_t block, PointCodes& into) {
  Reader(layout, parts, block).point_codes(into);
}

template <typename Reader>
size_t blocks_in(size_t cols) {
  return (cols + Reader::kBlock - 1) / Reader::kBlock;
}

// Scales as panels and dot products take them: repeated for each 32 columns, or 16.
template <typename Reader>
constexpr size_t run_of(size_t unit) {
  return unit * (Reader::kRun == 16 ? 16 : 32) / std::min(Reader::kRun, Reader::kBlock);
}

template <typename Reader>
void decode_row_scalar(const Layout& layout, RowOf parts, size_t cols, float* out, bool) {
  float scale[runs_of<Reader>()], offset[runs_of<Reader>()];
  for (size_t b = 0; b < blocks_in<Reader>(cols); ++b) {
    const Reader block(layout, parts, b);
    scales_of(block, scale, offset);
    const size_t first = b * Reader::kBlock, count = std::min(Reader::kBlock, cols - first);
    for (size_t j = 0; j < count; ++j) {
      const size_t run = j / std::min(Reader::kRun, Reader::kBlock);
      float value = scale[run] * static_cast<float>(block.byte(j) - Reader::kZero);
      if constexpr (SignedZeros<Reader>)
        if (block.minus_zero(j) && value == 0) value = -value;
      out[first + j] = Reader::kOffsets ? value + offset[run] : value;
    }
  }
}

template <typename Reader>
float dot_row_scalar(const Layout& layout, RowOf parts, const ActivationRow& x, size_t cols) {
  constexpr size_t kUnit = Reader::kRun == 16 ? 16 : 32;
  float scale[runs_of<Reader>()], offset[runs_of<Reader>()], total = 0;
  for (size_t b = 0; b < blocks_in<Reader>(cols); ++b) {
    const Reader block(layout, parts, b);
    scales_of(block, scale, offset);
    const size_t first = b * Reader::kBlock, count = std::min(Reader::kBlock, cols - first);
    for (size_t j = 0; j < count; j += kUnit) {
      const size_t run = j / std::min(Reader::kRun, Reader::kBlock), column = first + j;
      int32_t sum = 0;
      for (size_t k = j; k < std::min(j + kUnit, count); ++k) sum += (block.byte(k) - Reader::kZero) * x.q[first + k];
      total += scale[run] * x.scale[column / 32] * static_cast<float>(sum);
      if constexpr (Reader::kOffsets) total += offset[run] * (kUnit == 16 ? x.sum_16 : x.sum_32)[column / kUnit];
    }
  }
  return total;
}

template <typename Reader, size_t kRows>
void dot_rows_scalar(const Layout& layout, const RowOf* parts, const ActivationRow& x, size_t cols, float* out) {
  for (size_t row = 0; row < kRows; ++row) out[row] = dot_row_scalar<Reader>(layout, parts[row], x, cols);
}

template <typename Reader>
void fill_panel_scalar(const Layout& layout, PanelRows rows, size_t first_column, size_t columns, size_t cols, Panel& panel) {
  constexpr size_t kUnit = Reader::kRun == 16 ? 16 : 32;
  float scale[runs_of<Reader>()], offset[runs_of<Reader>()];
  for (size_t row = 0; row < kPanelRows; ++row) {
    for (size_t start = 0; start < columns; start += Reader::kBlock) {
      const Reader block(layout, rows[row].data(), (first_column + start) / Reader::kBlock);
      scales_of(block, scale, offset);
      const size_t count = std::min(Reader::kBlock, cols - first_column - start);
      for (size_t j = 0; j < Reader::kBlock; ++j)
        panel.bytes[(start + j) / 4][row][(start + j) % 4] = j < count ? block.byte(j) : 0;
      for (size_t unit = 0; unit < Reader::kBlock / kUnit; ++unit) {
        panel.scale[start / kUnit + unit][row] = scale[run_of<Reader>(unit)];
        if constexpr (Reader::kOffsets) panel.offset[start / kUnit + unit][row] = offset[run_of<Reader>(unit)];
      }
    }
  }
}

template <typename Reader>
constexpr Functions scalar_functions(PackRow pack_row) {
  Functions of{decode_row_scalar<Reader>, pack_row,          dot_rows_scalar<Reader, 1>, dot_rows_scalar<Reader, 4>,
               fill_panel_scalar<Reader>, bytes_of<Reader>()};
  if constexpr (Nested<Reader>) of.sub_scales = sub_scales_at<Reader>;
  if constexpr (requires { Reader::codebook(); }) of.point_codes = point_codes_at<Reader>;
  return of;
}

// Registers a format with its readers, the scalar one first, in the table of kernels. reader_x86.h adds those of x86-64.
template <typename... EachReader>
struct Readers;

template <typename Scalar>
struct Readers<Scalar> {
  Kernel scalar;

  Readers(const Layout& layout, PackRow pack_row)
      : scalar(layout, "scalar", runs_everywhere, scalar_functions<Scalar>(pack_row)) {}
};

}  // namespace fewbits
