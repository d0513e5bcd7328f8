// Searches for scales in integers (formats/search/integers.py) and quantization of whole weights: shared by quantize*.{cc,inc}.
//
// Layout: a lane is a group of weights under one scale, or a super-block of such groups; each instruction set has as many lanes
// as a register has 32-bit numbers. Two weights of a group are the two 16-bit halves of its lane, so that one instruction
// multiplies both and adds the products. All sums are exact, so every instruction set gives the same bits.
//
// Bound by these products: q4_k with an importance tries 116 lines, each with eleven instructions for 32 weights. Measured on one
// thread, packing included: ns per weight without and with an importance, and in brackets how many times longer
// ggml_quantize_chunk takes than the latter.
//   AVX-512: q4_0 3.3, 5.2 (6)  q2_k 14, 20 (9)  q3_k 6.8, 8.8 (5)  q4_k 12, 16 (9)  q6_k 6, 9 (4)  iq4_xs 8, 11 (37)
//   AVX2, with an importance: q4_0 9, q2_k 37, q4_k 30, q6_k 15, iq4_xs 22
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace fewbits::quantize {

constexpr size_t kMost = 256;     // weights in a group
constexpr size_t kMostSubs = 16;  // groups in a super-block

// The bits of `value`, which is exactly a float16. Static, because each instruction set must have its own.
static inline uint16_t float16_bits(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size < 0x38800000) return static_cast<uint16_t>(sign | static_cast<uint32_t>(__builtin_bit_cast(float, size) * 0x1p24f));
  return static_cast<uint16_t>(sign | ((size >> 13) - (112 << 10)));
}

// Groups of n weights, one after another. Groups use the rows of the importance in turn.
struct Source {
  const float* x;
  size_t n;
  const float* importance;  // may be null: all equal
  size_t periods;
};

// Plain lists without member functions, which would be compiled for one instruction set and might be called by all.
struct Integers {
  int at[128];
  size_t count;
};
struct Floats {
  float at[128];
  size_t count;
};

// These four as in formats/search/trial_points.py and formats/search/superblocks.py, which make them.
struct ScaleSearch {
  int bits, low, high;  // of `Steps`: fractional bits between two levels, and the outermost levels
  Integers levels;      // ascending; none: consecutive integers
  Integers thresholds;  // between them, with the fractional bits
  float end;            // the level that round-to-nearest gives the largest weight
  bool one_end, float16;
  Integers inverses;
  Floats around;
};

struct LineSearch {
  int top, bits;
  bool float16;
  Floats kept;      // (below, above), each
  Integers starts;  // (where it begins, inverse scale), each
};

struct ScaleUnits {
  size_t per_super;
  int low, high;
  Floats ends;  // what the largest scale may become
  Integers steps;
  int rounds;
};

struct LineUnits {
  size_t per_super;
  int largest;
  Floats ends;
  Floats factors;  // of d and dmin, each
  Integers steps;  // of both integers, each
  int rounds;
};

// How a weight becomes a code, as in formats/storage/codes.py.
struct Codes {
  float first, last;  // consecutive levels
  Floats boundaries;  // other levels: the number of boundaries below a weight
  Integers order;     // is an index into this list of codes
  Floats levels;      // and into their levels
};

// A scale 2^(code - 127), where the code is near that of round-to-nearest: the exponent of the largest weight plus `beyond`.
struct ExponentSearch {
  int beyond;
  Integers steps;
};

// The searches of one instruction set, for groups (or super-blocks) `begin` to `end`; results are written at the same indices.
// False if a weight is NaN. If `wanted` (`scale`) is null it is searched for first.
struct Searches {
  bool (*scales)(const Source&, const ScaleSearch&, size_t begin, size_t end, float* scale);
  bool (*lines)(const Source&, const LineSearch&, size_t begin, size_t end, float* scale, float* minimum);
  bool (*sub_scales)(const Source&, const ScaleSearch&, const ScaleUnits&, const float* wanted, size_t begin, size_t end,
                     int8_t* sub, uint16_t* d);
  bool (*sub_lines)(const Source&, const LineSearch&, const LineUnits&, const float* scale, const float* minimum, size_t begin,
                    size_t end, uint8_t* sub, uint8_t* sub_min, uint16_t* d, uint16_t* dmin);
  bool (*exponents)(const Source&, const ExponentSearch&, const Codes&, size_t begin, size_t end, uint8_t* code);
  void (*encode)(const float* x, size_t groups, size_t n, const float* scale, const float* offset, const Codes&, uint8_t* codes);
};

extern const Searches scalar_searches;
#if defined(__x86_64__)
extern const Searches avx2_searches, avx512_searches;
#endif

const Searches& find_searches(const std::string& isa);  // throws std::invalid_argument if it does not run here
std::vector<std::string> search_isas();                 // those that run here, fastest first

static inline void needs(bool true_one, const char* what) {
  if (!true_one) throw std::invalid_argument(what);
}

}  // namespace fewbits::quantize
