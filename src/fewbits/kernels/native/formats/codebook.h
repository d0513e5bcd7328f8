// GGUF's codebook types: a code names a point, eight (or four) weights at once, in super-blocks of 256.
//
//     w = d * (2s + 1) * unit * (+-magnitude), or in iq1, whose points are of -1, 0 and 1: * (8 * coordinate +- 1)
//
// The points come from Python once (formats/storage/grids.py), before the first weight is read: `Codebook::given`.
#pragma once

#include "formats/reader.h"

namespace fewbits {

constexpr size_t kMostPoints = 2048;

enum class Signs : uint8_t {
  kSeven,
  kEight,
  kOfRun,
  kOfPoint
};  // seven: the last of eight makes their number even; kOf...: shifts

// The eight signs of seven.
alignas(64) inline constexpr std::array<uint8_t, 128> kEightSigns = [] {
  std::array<uint8_t, 128> all{};
  for (unsigned seven = 0; seven < 128; ++seven)
    all[seven] = static_cast<uint8_t>(seven | static_cast<unsigned>(std::popcount(seven) % 2) << 7);
  return all;
}();

// Its constructor adds it to the list that `find_codebook` searches: each is a static object of its file.
struct Codebook {
  const char* format;
  size_t points, dims;
  int zero;  // of its bytes
  float unit;
  Signs signs;
  bool given = false;
  Codebook* next;
  alignas(64) uint8_t bytes[8 * kMostPoints] = {};  // of each coordinate: its magnitude, in iq1 zero + 8 * coordinate
  alignas(64) uint8_t codes[2][kMostPoints] = {};   // of each half of the coordinates: places in `levels`, the first lowest
  alignas(64) uint8_t levels[64] = {};              // bytes by code and, above it, sign; repeated

  Codebook(const char* format, size_t points, size_t dims, int zero, float unit, Signs signs);
  Codebook(const Codebook&) = delete;
  Codebook& operator=(const Codebook&) = delete;

  bool shifts() const { return signs >= Signs::kOfRun; }
  int code_bits() const { return dims == 8 ? 2 : 3; }
  void give(const int8_t* coordinates);  // points * dims of them
};

Codebook* find_codebook(const char* format);  // null: the format has none
void require_grid(const char* format);        // throws std::invalid_argument if the format has points that were not given

// A block of 256 as it is stored, for everything but speed.
struct PointCodes {
  uint16_t d = 0;           // bits of float16
  uint16_t index[64] = {};  // of the points, 32 or 64
  uint8_t signs[32] = {};   // for each 8 columns, the first lowest, 1: negative; all alike if they are shifts
  uint8_t scale[16] = {};   // s, for each 32 columns or 16
};

inline int byte_of(const Codebook& codebook, const PointCodes& codes, size_t j) {
  const int byte = codebook.bytes[codes.index[j / codebook.dims] * codebook.dims + j % codebook.dims];
  const bool negative = codes.signs[j / 8] >> (j % 8) & 1;
  if (codebook.shifts()) return negative ? byte - 1 : byte + 1;
  return negative ? codebook.zero - byte : codebook.zero + byte;
}

// A format is a struct with its Block, its kRun, kBits, kUnit, its `codebook` and `read(const Block&, PointCodes&)`.
template <typename Format>
struct CodebookReader {
  static constexpr size_t kBlock = 256, kRun = Format::kRun, kBytes = sizeof(typename Format::Block);
  static constexpr int kBits = Format::kBits, kZero = Format::kZero;
  static constexpr bool kOffsets = false;
  const typename Format::Block& block;

  CodebookReader(const Layout&, RowOf parts, size_t b) : block(reinterpret_cast<const typename Format::Block*>(parts[0])[b]) {}
  const void* address() const { return &block; }
  static constexpr const Codebook* codebook() { return &Format::codebook; }
};

template <typename Format>
struct CodebookScalar : CodebookReader<Format> {
  PointCodes codes;

  CodebookScalar(const Layout& layout, RowOf parts, size_t b) : CodebookReader<Format>(layout, parts, b) {
    Format::read(this->block, codes);
  }

  void point_codes(PointCodes& into) const { into = codes; }

  void scales(float* scale, float*) const {
    const float unit = float_of(codes.d) * Format::kUnit;
    for (size_t i = 0; i < 256 / Format::kRun; ++i) scale[i] = unit * static_cast<float>(2 * codes.scale[i] + 1);
  }

  uint8_t byte(size_t j) const { return static_cast<uint8_t>(byte_of(Format::codebook, codes, j)); }
};

inline void read_nibbles(const uint8_t* from, size_t count, uint8_t* into) {
  for (size_t i = 0; i < count; ++i) into[i] = from[i / 2] >> (i % 2 * 4) & 15;
}

}  // namespace fewbits
