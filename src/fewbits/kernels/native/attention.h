// What attention over a packed cache is made of, once for each instruction set; attention.cc puts it
// together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace fewbits {

constexpr size_t kMostQueries = 4;   // that one product serves: as many sums as there are registers for
constexpr size_t kMostRows = 256;    // of codes in one product
constexpr size_t kRowsTogether = 4;  // whose codes lie side by side

// Codes of 4 or 8 bits from 0 on: [rows / 4][col][4 rows], `stride` bytes from four rows to the next four; the last four are
// complete, with any codes in rows that are not there. With four bits 32 columns (at the end, what is left) lie together: the
// first half in low nibbles, the second in high ones.
struct Codes {
  const uint8_t* start;
  int bits;
  size_t stride, rows, cols;
};

// One or more (1 to 4) rows of factors a, of sums out.
struct Factors {
  const float* a;
  size_t a_stride, count;
  float* out;
  size_t out_stride;
};

// Where factors are rounded to integers, up to `most` of them: what 1 stands for. Not a number where a factor is none or
// infinite, so that the sums are neither; 0 where all are next to nothing, which leaves less than 2 ** -84 out.
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
  // scores to exp(score - largest); gives their sum. NaN in, NaN out. What would be below e**-87 is 0.
  float (*exponentials)(float* scores, size_t n, float& largest);
};

#if defined(__x86_64__)
extern const AttentionIsa kAttentionAvx512;  // attention_vnni.cc
extern const AttentionIsa kAttentionAvx2;    // attention_products.cc
#endif
extern const AttentionIsa kAttentionScalar;

constexpr size_t kNibbleBlock = 32;  // columns of four bits that lie together

// For exponentials: e**x = 2**n e**r, |r| <= ln(2) / 2: the series to the seventh power leaves 2**-27 of it.
constexpr float kSeries[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
constexpr float kLog2E = 1.44269504f;
constexpr float kLn2High = 0.693359375f;    // with so few bits that n times it is exact
constexpr float kLn2Low = -2.12194440e-4f;  // the two together are ln 2
constexpr float kLeast = -87;               // e to it is the last that is surely not subnormal

// Asks for what a product reads later: for each line of these bytes, one of the next 16 kB, and of its four pages in turn. The
// processor fetches ahead by itself, but not beyond a page, and tiles of columns leave gaps; pages side by side are fetched
// faster than one after another. Where there is no memory nothing happens. Without it everything takes 1.3 to 1.6 times as long.
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
