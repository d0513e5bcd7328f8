// The operations of attention over a packed cache, once for each instruction set; attention.cc combines them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace fewbits {

constexpr size_t kMostQueries = 4;   // in one product: there are registers for so many sums
constexpr size_t kMostRows = 256;    // of codes in one product
constexpr size_t kRowsTogether = 4;  // whose codes are side by side

// Codes of 4 or 8 bits, from 0 up: [rows / 4][col][4 rows], `stride` bytes from four rows to the next four; the last four are
// complete, with arbitrary codes in missing rows. 4-bit codes are stored by 32 columns (at the end, the remainder): the first
// half in low nibbles, the second in high ones.
struct Codes {
  const uint8_t* start;
  int bits;
  size_t stride, rows, cols;
};

// 1 to 4 rows of factors a, and of sums out.
struct Factors {
  const float* a;
  size_t a_stride, count;
  float* out;
  size_t out_stride;
};

// Factors are rounded to integers of up to `most`: the value of 1. NaN if a factor is NaN or infinite, so that the sums are NaN
// too; 0 if all are so small that less than 2 ** -84 is lost.
inline float unit_of(float largest, float most) {
  if (!(largest <= std::numeric_limits<float>::max())) return std::numeric_limits<float>::quiet_NaN();
  return largest < 0x1p-100f ? 0 : largest / most;
}

struct AttentionIsa {
  const char* name;
  bool (*runs_here)();
  // out[i][col] += sum over rows of a[i][row] * code[row][col]
  void (*accumulate)(const Codes& codes, const Factors& factors);
  // the same over float32, (rows, cols) with `stride` floats from row to row
  void (*accumulate_floats)(const float* values, size_t stride, size_t rows, size_t cols, const Factors& factors);
  // float16 to float32
  void (*widen)(const uint8_t* halves, size_t n, float* out);
  // scaled = a * scale; gives the sum of a * offset
  float (*scale_and_dot)(const float* a, const float* scale, const float* offset, size_t n, float* scaled);
  // scores to exp(score - largest); gives their sum. NaN stays NaN. Results below e**-87 are 0.
  float (*exponentials)(float* scores, size_t n, float& largest);
};

#if defined(__x86_64__)
extern const AttentionIsa kAttentionAvx512;  // vnni.cc
extern const AttentionIsa kAttentionAvx2;    // products.cc
#endif
extern const AttentionIsa kAttentionScalar;

constexpr size_t kNibbleBlock = 32;  // columns of 4-bit codes that are stored together

// For exponentials: e**x = 2**n * e**r, |r| <= ln(2) / 2; the series up to the seventh power has a relative error of 2**-27.
constexpr float kSeries[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
constexpr float kLog2E = 1.44269504f;
constexpr float kLn2High = 0.693359375f;    // has so few bits that n times it is exact
constexpr float kLn2Low = -2.12194440e-4f;  // the two together are ln 2
constexpr float kLeast = -87;               // e**-87 is safely above the subnormal numbers

// Prefetches what a product reads later: for each cache line of these bytes, a line of the next 16 kB, from its four pages in
// turn. The processor prefetches by itself, but not beyond a page, and tiles of columns leave gaps; four pages at once are faster
// than one after another. Prefetching past the end is harmless. Without it attention takes 1.3 to 1.6 times as long.
inline void fetch_ahead(const uint8_t* bytes, size_t count) {
  constexpr uintptr_t kLine = 64, kPage = 4096, kWindow = 4 * kPage;
  const uintptr_t start = reinterpret_cast<uintptr_t>(bytes);
  for (uintptr_t at = start; at < start + count; at += kLine) {
    const uintptr_t next = at / kWindow * kWindow + kWindow, page = at / kLine % 4, line = at % kWindow / kLine / 4;
    __builtin_prefetch(reinterpret_cast<const void*>(next + page * kPage + line * kLine));
  }
}

// Calls with the count as a constant.
template <typename Call>
void for_count(size_t count, const Call& call) {
  if (count == 1) return call(std::integral_constant<size_t, 1>());
  if (count == 2) return call(std::integral_constant<size_t, 2>());
  if (count == 3) return call(std::integral_constant<size_t, 3>());
  call(std::integral_constant<size_t, 4>());
}

}  // namespace fewbits
