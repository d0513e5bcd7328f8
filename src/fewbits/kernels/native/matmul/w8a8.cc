// Implements w8a8.h. Panels of weights and tiles of x as in matmul.cc, but scales are applied only at the end, so that a block of
// columns costs no more than its products.
//
// VNNI takes weights as unsigned bytes, w + 128, and its sums begin with -128 times the sum of x. AVX2 passes the weight's sign
// to x, so that two products fit 16 bits: |w| <= 128 and |x| <= 127. With a -128 in x they would not; for such rows products of
// 16 bits are added in 32. NEON's products of four bytes are exact for all inputs; without them it distinguishes the same cases.
#include "matmul/w8a8.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "platform/avx512.h"
#include "platform/avxvnni.h"
#include "platform/neon.h"
#include "platform/threads.h"

namespace fewbits {
namespace {

constexpr size_t kWeights = kPanelRows, kSteps = kPanelColumns / 4;
constexpr size_t kWorthAThread = 1 << 17;  // products

struct Tile8 {
  size_t rows;
  const int8_t* x;  // [4 columns][row][column]
};

using Multiply8 = void (*)(const Panel&, const Tile8&, size_t steps, int32_t* sums);  // adds to sums (rows, kWeights)

struct RowFacts {
  int32_t sum;
  bool has_least;  // a -128
};

// sums[i] = the product of x with four rows of weights, pages apart: memory is read faster in several places at once.
using DotFour = void (*)(const int8_t* x, const int8_t* const* w, size_t cols, int32_t* sums);
// sums[i] += the product of row i of x, `apart` bytes after the one before, with a row of weights; eight rows at most.
using DotFew = void (*)(const int8_t* x, size_t apart, size_t rows, const int8_t* w, size_t cols, int32_t* sums);
using Look = RowFacts (*)(const int8_t* x, size_t cols);

struct Kernel8 {
  const char* isa;
  bool (*runs_here)();
  Multiply8 multiply, multiply_wide;  // wide: for rows with a -128 in x
  size_t rows;
  bool unsigned_weights;
  Look look;
  DotFour dot_four;
  bool dot_adds_128;
  DotFew dot_few;  // may be null; not for rows with a -128
};

// Always inlined, so that each instruction set compiles its own version.
#define FEWBITS_LINES inline __attribute__((always_inline))

FEWBITS_LINES RowFacts look_at(const int8_t* x, size_t cols) {
  int32_t sum = 0;
  int8_t least = 0;
  for (size_t j = 0; j < cols; ++j) {
    sum += x[j];
    least = x[j] < least ? x[j] : least;
  }
  return {sum, least == -128};
}

void dot_four_scalar(const int8_t* x, const int8_t* const* w, size_t cols, int32_t* sums) {
  for (size_t i = 0; i < 4; ++i) {
    sums[i] = 0;
    for (size_t j = 0; j < cols; ++j) sums[i] += x[j] * w[i][j];
  }
}

RowFacts look_scalar(const int8_t* x, size_t cols) { return look_at(x, cols); }
#if defined(__x86_64__)
FEWBITS_AVX2 RowFacts look_avx2(const int8_t* x, size_t cols) { return look_at(x, cols); }
#endif

void multiply_scalar(const Panel& panel, const Tile8& x, size_t steps, int32_t* sums) {
  for (size_t row = 0; row < x.rows; ++row)
    for (size_t w = 0; w < kWeights; ++w)
      for (size_t j = 0; j < 4 * steps; ++j)
        sums[row * kWeights + w] += panel.bytes[j / 4][w][j % 4] * x.x[(j / 4 * x.rows + row) * 4 + j % 4];
}

#if defined(__x86_64__)
inline int32_t four_of(const Tile8& x, size_t step, size_t rows, size_t row) {
  int32_t four;
  std::memcpy(&four, x.x + (step * rows + row) * 4, 4);
  return four;
}

constexpr size_t kAhead = 1024, kAheadOfRow = 4096;  // bytes to prefetch ahead, in four places or in one

#include "matmul/w8a8_avx2.inc"

namespace vnni_512 {
using namespace avx512;
constexpr size_t kMostRows = 12;
#define FEWBITS_ISA FEWBITS_AVX512
#include "matmul/w8a8_vnni.inc"
#undef FEWBITS_ISA
}  // namespace vnni_512

namespace vnni_256 {
using namespace avxvnni;
constexpr size_t kMostRows = 6;
#define FEWBITS_ISA FEWBITS_AVXVNNI
#include "matmul/w8a8_vnni.inc"
#undef FEWBITS_ISA
}  // namespace vnni_256
#elif defined(__aarch64__)
namespace dotprod {
using neon_dotprod::add_dot;
#define FEWBITS_ISA FEWBITS_DOTPROD
#include "matmul/w8a8_neon.inc"
#undef FEWBITS_ISA
}  // namespace dotprod

namespace plain {
using neon_plain::add_dot;
#define FEWBITS_ISA
#include "matmul/w8a8_neon.inc"
#undef FEWBITS_ISA
}  // namespace plain

namespace wide {
using neon_wide::add_dot;
#define FEWBITS_ISA
#include "matmul/w8a8_neon.inc"
#undef FEWBITS_ISA
}  // namespace wide

bool has_no_dotprod() { return !has_dotprod(); }
#endif

constexpr Kernel8 kKernels[] = {
#if defined(__x86_64__)
    {"avx512", has_avx512, vnni_512::rows, vnni_512::rows, vnni_512::kMostRows, true, vnni_512::look, vnni_512::dot_four, true,
     nullptr},
    {"avxvnni", has_avxvnni, vnni_256::rows, vnni_256::rows, vnni_256::kMostRows, true, vnni_256::look, vnni_256::dot_four, true,
     nullptr},
    {"avx2", has_avx2, rows_avx2, multiply_wide_avx2, 4, false, look_avx2, dot_four_avx2, false, dot_few_avx2},
#elif defined(__aarch64__)
    {"neon", has_dotprod, dotprod::multiply_rows, dotprod::multiply_rows, 4, false, look_scalar, dotprod::dot_four, false,
     nullptr},
    {"neon", has_no_dotprod, plain::multiply_rows, wide::multiply_rows, 4, false, look_scalar, wide::dot_four, false, nullptr},
#endif
    {"scalar", [] { return true; }, multiply_scalar, multiply_scalar, 4, true, look_scalar, dot_four_scalar, false, nullptr},
};

const Kernel8* find(const char* isa) {
  for (const Kernel8& kernel : kKernels)
    if (!std::strcmp(kernel.isa, isa) && kernel.runs_here()) return &kernel;
  return nullptr;
}

// Memory that is kept between calls.
struct Room {
  std::vector<int8_t> packed;      // [512 columns][tile][4 columns][row][column]: memory is read from front to back
  std::vector<int32_t> starts;     // the initial value of each row's sums
  std::vector<uint8_t> has_least;  // whether a tile has a -128
};

// Row r of a tile of n rows that begins with row `first`.
void pack_row(const int8_t* x, size_t cols, size_t n, size_t first, size_t r, size_t rows, int8_t* packed) {
  const size_t all_steps = (cols + 3) / 4;
  for (size_t start = 0; start < all_steps; start += kSteps) {
    const size_t steps = std::min(kSteps, all_steps - start), whole = std::min(steps, cols / 4 - start);
    int8_t* const into = packed + 4 * (rows * start + first * steps + r);
    for (size_t step = 0; step < whole; ++step) std::memcpy(into + 4 * step * n, x + 4 * (start + step), 4);
    if (whole < steps) {
      std::memset(into + 4 * whole * n, 0, 4);
      std::memcpy(into + 4 * whole * n, x + 4 * (start + whole), cols % 4);
    }
  }
}

float scaled(const IntegerProduct& product, size_t row, size_t w, int32_t sum) {
  const float value = static_cast<float>(sum) * (product.x_scale[row] * product.w_scale[w]);
  return product.bias ? value + product.bias[w] : value;
}

// One row: every weight is read once, in the order of memory, in four places.
void stream_row(const Kernel8& kernel, const IntegerProduct& product, size_t row, int threads) {
  constexpr size_t kBytesAtATime = 128 << 10;
  const int8_t* const x = product.x + row * product.cols;
  // the excess in VNNI's sums: the scalar kernel and AVX2 multiply the signed weights themselves
  const int32_t start = kernel.dot_adds_128 ? -128 * kernel.look(x, product.cols).sum : 0;
  const size_t length = std::max<size_t>(1, kBytesAtATime / std::max<size_t>(1, product.cols) / 4), at_a_time = 4 * length;
  const size_t visits = (product.weights + at_a_time - 1) / at_a_time;
  const size_t shares = shares_of(threads, std::min(visits, std::max<size_t>(1, product.cols * product.weights / kWorthAThread)));
  std::atomic<size_t> next = 0;
  run_shares(shares, [&](size_t) {
    for (size_t visit; (visit = next.fetch_add(1)) < visits;) {
      const size_t first = visit * at_a_time, count = std::min(at_a_time, product.weights - first), apart = (count + 3) / 4;
      for (size_t i = 0; i < apart; ++i) {
        const int8_t* w[4];
        int32_t sums[4];
        for (size_t k = 0; k < 4; ++k) w[k] = product.w + (first + std::min(k * apart + i, count - 1)) * product.cols;
        kernel.dot_four(x, w, product.cols, sums);
        for (size_t k = 0; k < 4; ++k)
          if (k * apart + i < count) {
            const size_t at = first + k * apart + i;
            product.out[row * product.weights + at] = scaled(product, row, at, sums[k] + start);
          }
      }
    }
  });
}

constexpr size_t kFew = 16;  // rows

// A few rows: to make a panel of the weights would take longer than to multiply them. Rows of x are multiplied eight at a time
// and in parts that stay in the first-level cache, by weights that stay in the second-level one.
void stream_few(const Kernel8& kernel, const IntegerProduct& product, int threads) {
  constexpr size_t kBytesAtATime = 128 << 10, kColumns = 4096, kAtOnce = 8;
  const size_t cols = product.cols, at_a_time = std::max<size_t>(1, kBytesAtATime / std::max<size_t>(1, cols));
  const size_t visits = (product.weights + at_a_time - 1) / at_a_time, products = product.rows * cols * product.weights;
  std::atomic<size_t> next = 0;
  run_shares(shares_of(threads, std::min(visits, std::max<size_t>(1, products / kWorthAThread))), [&](size_t) {
    std::vector<int32_t> sums(at_a_time * kAtOnce);
    for (size_t visit; (visit = next.fetch_add(1)) < visits;) {
      const size_t first = visit * at_a_time, count = std::min(at_a_time, product.weights - first);
      for (size_t row = 0; row < product.rows; row += kAtOnce) {
        const size_t rows = std::min(kAtOnce, product.rows - row);
        std::fill(sums.begin(), sums.end(), 0);
        for (size_t start = 0; start < cols; start += kColumns)
          for (size_t w = 0; w < count; ++w)
            kernel.dot_few(product.x + row * cols + start, cols, rows, product.w + (first + w) * cols + start,
                           std::min(kColumns, cols - start), &sums[w * kAtOnce]);
        for (size_t r = 0; r < rows; ++r)
          for (size_t w = 0; w < count; ++w)
            product.out[(row + r) * product.weights + first + w] = scaled(product, row + r, first + w, sums[w * kAtOnce + r]);
      }
    }
  });
}

bool has_least(const Kernel8& kernel, const IntegerProduct& product) {
  for (size_t row = 0; row < product.rows; ++row)
    if (kernel.look(product.x + row * product.cols, product.cols).has_least) return true;
  return false;
}

}  // namespace

void multiply_integers(const char* isa, const IntegerProduct& product, int threads) {
  const Kernel8* const kernel = find(isa);
  if (!kernel) throw std::invalid_argument(std::string("no ") + isa + " kernel multiplies int8 by int8 here");
  if (product.cols > kMostIntegerColumns)
    throw std::invalid_argument("sums of 32 bits hold " + std::to_string(kMostIntegerColumns) + " products, not " +
                                std::to_string(product.cols));
  if (product.rows == 1) return stream_row(*kernel, product, 0, threads);
  if (kernel->dot_few && product.rows <= kFew && !has_least(*kernel, product)) return stream_few(*kernel, product, threads);
  const size_t rows = product.rows, all_steps = (product.cols + 3) / 4, tiles = (rows + kernel->rows - 1) / kernel->rows;
  const size_t rows_each = (rows + tiles - 1) / tiles, count = (rows + rows_each - 1) / rows_each;
  const size_t panels = (product.weights + kWeights - 1) / kWeights;
  const size_t shares = shares_of(threads, std::max<size_t>(1, rows * product.cols * product.weights / kWorthAThread));
  thread_local Room room_of_thread;
  Room& room = room_of_thread;
  room.packed.resize(rows * all_steps * 4);
  room.starts.resize(rows);
  room.has_least.assign(count, 0);
  std::atomic<size_t> next_tile = 0, next_panel = 0;
  run_shares(std::min(shares, count), [&](size_t) {
    for (size_t tile; (tile = next_tile.fetch_add(1)) < count;) {
      const size_t first = tile * rows_each, n = std::min(rows_each, rows - first);
      for (size_t r = 0; r < n; ++r) {
        const int8_t* x = product.x + (first + r) * product.cols;
        const RowFacts facts = kernel->look(x, product.cols);
        room.starts[first + r] = kernel->unsigned_weights ? -128 * facts.sum : 0;
        room.has_least[tile] |= facts.has_least;
        pack_row(x, product.cols, n, first, r, rows, room.packed.data());
      }
    }
  });
  const auto& reader = *find_kernel("int8_channel", isa);
  run_shares(std::min(shares, panels), [&](size_t) {
    thread_local const std::unique_ptr<Panel> panel = std::make_unique<Panel>();
    thread_local std::vector<int32_t> sums;
    sums.resize(rows * kWeights);
    for (size_t p; (p = next_panel.fetch_add(1)) < panels;) {
      const size_t first_weight = p * kWeights, n = std::min(kWeights, product.weights - first_weight);
      std::array<const uint8_t*, kMaxFields> weights[kWeights];
      constexpr uint8_t kNoScale[2] = {};  // the reader needs one, but scales are applied at the end
      for (size_t w = 0; w < kWeights; ++w) {
        const int8_t* row = product.w + (first_weight + std::min(w, n - 1)) * product.cols;
        weights[w] = {reinterpret_cast<const uint8_t*>(row), kNoScale};
      }
      for (size_t r = 0; r < rows; ++r) std::fill_n(&sums[r * kWeights], kWeights, room.starts[r]);
      for (size_t start = 0; start < all_steps; start += kSteps) {
        const size_t steps = std::min(kSteps, all_steps - start);
        reader.of.fill_panel(reader.layout, weights, 4 * start, 4 * steps, product.cols, *panel);
        for (size_t tile = 0; tile < count; ++tile) {
          const size_t first = tile * rows_each;
          const Tile8 x{std::min(rows_each, rows - first), &room.packed[4 * (rows * start + first * steps)]};
          (room.has_least[tile] ? kernel->multiply_wide : kernel->multiply)(*panel, x, steps, &sums[first * kWeights]);
        }
      }
      for (size_t r = 0; r < rows; ++r)
        for (size_t w = 0; w < n; ++w)
          product.out[r * product.weights + first_weight + w] = scaled(product, r, first_weight + w, sums[r * kWeights + w]);
    }
  });
}

}  // namespace fewbits
