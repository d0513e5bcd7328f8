// What a kernel is, and the table to which every file in formats/ adds its kernels. No other file names a kernel.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace fewbits {

static_assert(std::endian::native == std::endian::little, "packed weights are little-endian and read in place");

constexpr int kAbi = 8;  // raise it when module.cc's functions change; devices/processor.py has the same number
constexpr size_t kMaxFields = 4;

// One array of a packed weight or of its grid.
struct Field {
  const char* name = nullptr;
  size_t per_block = 0;  // bytes for each block of columns
  size_t per_row = 0;    // bytes for each row, in addition
  size_t bits = 0;       // bits for each block, padded to whole bytes at the end of a row

  size_t row_bytes(size_t blocks) const { return blocks * per_block + per_row + (blocks * bits + 7) / 8; }
};

// How a row of a format is stored: its arrays in the order of Python's `Format.parts`, its grid in the order of `Format.fit`.
struct Layout {
  const char* format;       // "q4_k"
  size_t block;             // columns packed together: a row is a whole number of blocks
  Field parts[kMaxFields];  // unused ones have no name
  Field grid[kMaxFields];
  size_t reach = 0;  // where one reader serves several formats: a scale covers 2^reach blocks of 32 columns
};

using RowOf = const uint8_t* const*;  // the current row of each field, not aligned
using RowInto = uint8_t* const*;

// `past`: bypass the caches, where the decoded weights would not fit them; out is then aligned to 64 bytes.
using DecodeRow = void (*)(const Layout&, RowOf parts, size_t cols, float* out, bool past);
using PackRow = void (*)(const Layout&, const uint8_t* codes, RowOf grid, size_t cols, RowInto parts);

// One row of activations in int8 with a scale per 32 columns; columns beyond the row's end, to a multiple of 32, are zeros.
struct ActivationRow {
  const int8_t* q;
  const float* scale;       // per 32 columns
  const int32_t* zeros;     // per 32 columns: -zero * the sum of q, for the zero of the format's bytes
  const int32_t* zeros_16;  // per 16
  const float* sum_32;      // scale * the sum of q, per 32 columns
  const float* sum_16;      // the same per 16
};

// A tile of weights in the form that integer products take, whatever the format: w = scale * (byte - zero) + offset.
constexpr size_t kPanelRows = 32, kPanelColumns = 512;
struct Panel {
  alignas(64) uint8_t bytes[kPanelColumns / 4][kPanelRows][4];
  alignas(64) float scale[kPanelColumns / 16][kPanelRows];   // per 32 columns, or per 16
  alignas(64) float offset[kPanelColumns / 16][kPanelRows];  // like the scales
  // or, for kernels that multiply by integer scales: these twice in 16 bits each, and the scale of the scales per 256 columns
  alignas(64) uint32_t sub[kPanelColumns / 16][kPanelRows];
  alignas(64) float d[kPanelColumns / 256][kPanelRows];
};
using PanelRows = const std::array<const uint8_t*, kMaxFields>*;  // kPanelRows of them

using DotRows = void (*)(const Layout&, const RowOf* parts, const ActivationRow& x, size_t cols, float* out);
// The products of `count` rows, one or four, with activations that are not rounded.
using DotFloats = void (*)(const Layout&, const RowOf* parts, size_t count, const float* x, size_t cols, float* out);
using FillPanel = void (*)(const Layout&, PanelRows rows, size_t first_column, size_t columns, size_t cols, Panel& panel);

struct Codebook;    // formats/codebook.h
struct PointCodes;  // the same
using PointCodesAt = void (*)(const Layout&, RowOf parts, size_t block, PointCodes& into);

// How a format stores its scales: directly, or as integers under one float16 per 256 columns.
enum class Scales : uint8_t { kHalf, kExponent, kFourBits, kSixBits, kEightBits };

// The integers of a block of 256: scale = d * sub, offset = -dmin * min.
struct SubScales {
  uint16_t d = 0, dmin = 0;  // bits of float16
  int8_t sub[16] = {};
  uint8_t min[16] = {};
};
using SubScalesAt = void (*)(const Layout&, RowOf parts, size_t block, SubScales& into);

// The bytes of a format: all that a micro-kernel has to know about it.
struct ByteTraits {
  int bits = 0;  // bytes are below 2^bits; 0: the format's levels are no integers
  int zero = 0;
  bool by_16 = false;  // a scale covers 16 columns
  bool offsets = false;
  // what matmul/tiles.h stores instead of bytes and float scales
  size_t run = 32;                  // columns under one scale, to be multiplied by 2^reach of the layout
  const uint8_t* levels = nullptr;  // 16 values, if a byte can have no others
  Scales scales = Scales::kHalf;
  int sub_zero = 0;                    // added to the integers of the scales as they are stored
  bool zero_points = false;            // offsets are the scale times an integer
  bool doubled = false;                // bytes are 0 or 2, and tiles hold their halves
  const Codebook* codebook = nullptr;  // if codes name points of it: tiles have a layout of their own (tiles_codebook.h)
};

struct Functions {
  DecodeRow decode_row = nullptr;
  PackRow pack_row = nullptr;  // may be null if another ISA of this format packs: packing happens once, decoding at every load
  DotRows dot_row = nullptr;   // of one row; this and the following are null if the format's levels are no integers
  DotRows dot_four = nullptr;  // of four rows
  FillPanel fill_panel = nullptr;
  ByteTraits bytes = {};
  SubScalesAt sub_scales = nullptr;    // of the scalar kernel, if scales are integers
  DotFloats dot_floats = nullptr;      // if it is faster than decoding a row first
  PointCodesAt point_codes = nullptr;  // of the scalar kernel, if the format has a codebook
};

// Its constructor adds it to the table: each kernel is a static object of its file.
struct Kernel {
  const Layout& layout;
  const char* isa;  // "scalar", "avx2", "avxvnni", "avx512", "neon"
  bool (*runs_here)();
  Functions of;
  const Kernel* next;

  Kernel(const Layout& layout, const char* isa, bool (*runs_here)(), const Functions& functions);
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;
};

const Kernel* first_kernel();
const Kernel* find_kernel(const char* format, const char* isa);
const Kernel* find_packer(const char* format);

inline bool runs_everywhere() { return true; }

template <typename T>
T load(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// Exact, with integer arithmetic only, so that subnormals are right even if the thread flushes them to zero.
inline float float_of(uint16_t bits) {
  const uint32_t half = bits, exponent = (half >> 10) & 31, fraction = half & 1023;
  const uint32_t sign = (half & 0x8000) << 16;
  if (exponent == 0) return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(fraction) * 0x1p-24f));
  const uint32_t wide = exponent == 31 ? 255 : exponent + 127 - 15;
  return std::bit_cast<float>(sign | wide << 23 | fraction << 13);
}

inline float float16_at(const uint8_t* at) { return float_of(load<uint16_t>(at)); }

}  // namespace fewbits
