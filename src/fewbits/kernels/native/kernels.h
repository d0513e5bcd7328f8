// What a kernel is, and the table that every kernel file adds itself to. No kernel is named anywhere but in its own file.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace fewbits {

static_assert(std::endian::native == std::endian::little, "packed weights are little-endian and read in place");

constexpr int kAbi = 3;  // raise it when module.cc's functions change; kernels/__init__.py holds the same number
constexpr size_t kMaxFields = 4;

// One array of a packed weight or of its grid.
struct Field {
  const char* name = nullptr;
  size_t per_block = 0;  // bytes for each block of columns
  size_t per_row = 0;    // bytes for each row, besides

  size_t row_bytes(size_t blocks) const { return blocks * per_block + per_row; }
};

// How a row of a format lies in memory: its arrays in the order of Python's `Format.parts`, its grid in that of `Format.fit`.
struct Layout {
  const char* format;       // "q4_k"
  size_t block;             // columns packed together: a row is a whole number of blocks
  Field parts[kMaxFields];  // unused ones have no name
  Field grid[kMaxFields];
};

using RowOf = const uint8_t* const*;  // the current row of each field; nothing is aligned
using RowInto = uint8_t* const*;

using DecodeRow = void (*)(RowOf parts, size_t cols, float* out);
using PackRow = void (*)(const uint8_t* codes, RowOf grid, size_t cols, RowInto parts);

// Constructing one, as a static of its own file, puts it into the table.
struct Kernel {
  const Layout& layout;
  const char* isa;  // "scalar", "avx2"
  bool (*runs_here)();
  DecodeRow decode_row;
  PackRow pack_row;  // may be null where another ISA of this format packs: packing happens once, decoding at every load
  const Kernel* next;

  Kernel(const Layout& layout, const char* isa, bool (*runs_here)(), DecodeRow decode_row, PackRow pack_row = nullptr);
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

// Exact, and by integers alone: a subnormal float16 comes out right even where the thread flushes subnormals to zero.
inline float float16_at(const uint8_t* at) {
  const uint32_t half = load<uint16_t>(at), exponent = (half >> 10) & 31, fraction = half & 1023;
  const uint32_t sign = (half & 0x8000) << 16;
  if (exponent == 0) return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(fraction) * 0x1p-24f));
  const uint32_t wide = exponent == 31 ? 255 : exponent + 127 - 15;
  return std::bit_cast<float>(sign | wide << 23 | fraction << 13);
}

// Error feedback (feedback.cc) serves every format alike: it knows levels, a scale and an offset, and no layout.
constexpr size_t kFeedbackColumns = 128;

struct FeedbackLevels {
  size_t count;
  bool consecutive;         // integers in code order: rounding is arithmetic
  const float* values;      // rising
  const float* boundaries;  // count - 1: above the i-th, value i + 1 is taken
  const uint8_t* codes;     // of each value
  const float* by_code;     // 256: what each code stands for
  int minus_zero;           // the code of -0 where it has its own; -1: it has not
};

struct FeedbackTile {  // (columns, rows) each, the coupling (columns, columns)
  size_t columns, rows;
  const float* targets;
  const float* weights;
  float* errors;
  uint8_t* codes;
  const float* scale;
  const float* offset;    // may be null
  const float* coupling;  // [k][i]: how much an error in column i moves the target of column k
  bool keep;              // give up a code only for one that is nearer to the target
};

using FeedbackVisit = void (*)(const FeedbackTile&, const FeedbackLevels&, size_t first, size_t count);

FeedbackVisit find_feedback(const char* isa);  // null where it does not run here
size_t feedback_strips(size_t rows);
void visit_feedback_strip(FeedbackVisit visit, const FeedbackTile& tile, const FeedbackLevels& levels, size_t strip);

}  // namespace fewbits
