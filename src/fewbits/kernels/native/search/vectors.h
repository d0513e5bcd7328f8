// Codes that stand for vectors of 4 or 8 weights (formats/storage/codebooks.py): the nearest point of a codebook, scales for it
// (formats/search/vectors.py) and error feedback, vector by vector (methods/error_feedback/vectors.py).
//
// Layout: a lane is a row; all lanes look at the same columns, which have one importance. A point is two halves, and there are at
// most 81 halves: their costs are computed first. For each first half the cheapest of its second halves is found; what the sets
// of these share is found once (search/minima.h). All points are looked at, so that the result is exact.
//
// Trials of scales compare sums in 16 bits, two rows in a lane; codes are chosen in float32. Every instruction set does the same
// operations in the same order, so that the bytes are the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "search/minima.h"

namespace fewbits::vectors {

constexpr size_t kMostDimension = 8, kMostHalves = 81, kMostLevels = 8;
constexpr size_t kBlock = 256, kMostGroups = 16, kMostColumns = 128, kMostTrials = 16;

enum class Signs : uint8_t { kInPoints, kFree, kEven };

// Plain arrays without member functions, which would be compiled for one instruction set and might be called by all.
struct Book {
  size_t dimension, width;  // of a vector, and of a point: a vector is one or two points
  Signs signs;
  float shifts[2];  // of a vector, if there are any
  size_t shift_count;
  int index_bits;
  size_t level_count;
  float levels[kMostLevels];
  float faintest;  // of a vector's energy, over its weights': below, trials see no difference
  size_t half_count;
  const int16_t* numbers;  // of the point of a first half and a second, first by first; -1: there is none
  const uint8_t* begun;    // whether a point has this first half
  const float* grid;       // (points, width) by number
  size_t pair_count;
  const size_t* sets;  // of Minima, as those below: the sets of second halves, by the first
  const uint16_t *pairs, *order, *members;
};

// Rows of weights. A group of columns has a scale, and what is taken from the weights before they are divided by it.
struct NearestRows {
  const float* x;
  const float* weight;  // of each column
  size_t cols, group;
  const float* scale;   // (rows, groups); null: 1
  const float* offset;  // may be null
  int32_t* codes;
};

struct Fit {
  size_t group, largest, trials;
  bool by_levels;         // trials look at each weight alone
  float spread;           // of the points: their root mean square
  float low, high, peak;  // between which scales are tried
  float group_shift;      // of all points of a group, up or down; 0: none
};

// Rows of a weight, each with `blocks` blocks of 256 columns, and what is found for them.
struct FitRows {
  const float* x;
  const float* weight;  // of each column
  size_t cols;
  int8_t* sub;
  int8_t* shift;  // null if there are none
  uint16_t* d;
};

// Arrays of (columns, rows); codes are (columns / dimension, rows), the coupling (columns, columns) with a stride of its own, the
// metric (columns, dimension): what an error in one column of a vector costs together with one in another.
struct Tile {
  size_t columns, rows;
  const float* targets;
  const float* weights;
  float* errors;
  int32_t* codes;
  const float* scale;
  const float* offset;  // may be null
  const float* coupling;
  size_t coupling_stride;
  const float* metric;
  bool keep;     // change a code only for one that costs less
  int attempts;  // to lower the cost of a vector, given the errors of its other columns
};

struct Searches {
  size_t lanes;
  void (*nearest)(const Book&, const NearestRows&, size_t begin, size_t end);
  void (*fit)(const Book&, const Fit&, const FitRows&, size_t begin, size_t end);
  void (*visit)(const Book&, const Tile&, size_t begin, size_t end);
};

extern const Searches scalar_searches;
#if defined(__x86_64__)
extern const Searches avx2_searches, avx512_searches;
#endif

const Searches& find_searches(const std::string& isa);  // throws std::invalid_argument if it does not run here

}  // namespace fewbits::vectors
