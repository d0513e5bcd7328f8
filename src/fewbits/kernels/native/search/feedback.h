// Error feedback (methods/error_feedback): what a visit to the columns of a tile is given, and the loop over the blocks of rows
// that makes these visits. It works for every format: it needs levels or points, scales and offsets, but no layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "search/fitting.h"
#include "search/product.h"
#include "search/vectors.h"

namespace fewbits {

constexpr size_t kFeedbackColumns = 128, kFeedbackRows = 64;  // of a tile at most

struct FeedbackLevels {
  size_t count;
  bool consecutive;         // the levels are consecutive integers: rounding is arithmetic
  const float* values;      // ascending
  const float* boundaries;  // count - 1 of them: above the i-th, value i + 1 is nearer
  const uint8_t* codes;     // the code of each value
  const float* by_code;     // 256: the level of each code
  int minus_zero;           // the code of -0; -1: the format has none
};

struct FeedbackTile {  // arrays of (columns, rows)
  size_t columns, rows;
  const float* targets;
  const float* weights;
  float* errors;
  uint8_t* codes;
  const float* scale;
  const float* offset;     // may be null
  const float* coupling;   // [k][i]: how much an error in column i moves the target of column k
  size_t coupling_stride;  // from one k to the next
  bool keep;               // change a code only for one that is nearer to the target
};

using FeedbackVisit = void (*)(const FeedbackTile&, const FeedbackLevels&, size_t first, size_t count);

FeedbackVisit find_feedback(const char* isa);  // null if this processor does not have it
size_t feedback_strips(size_t rows);
void visit_feedback_strip(FeedbackVisit visit, const FeedbackTile& tile, const FeedbackLevels& levels, size_t strip);

// A block of the format, given the errors of all others: `Part` of methods/error_feedback/hessian.py.
struct FeedbackPart {
  const float* others;   // (block, columns)
  const float* forward;  // (block, block)
  const float* hessian;  // (block, block)
  const float* pivots;   // (block, dimension); null if codes are of single columns
};

// `Ordered` of methods/error_feedback/hessian.py. Couplings are (columns, columns), columns in visiting order.
struct FeedbackOrder {
  size_t columns;
  const int64_t* natural;           // where each visited column is in the weight
  std::vector<size_t> starts;       // of the blocks, and the end of the last
  const float* weight;              // in natural order: of each column of a block while its scales are fitted
  const float *ahead, *forward;     // `ahead` may be null if there is one block
  const float* every;               // may be null if there are no later passes
  const float *pivots, *own;        // (columns, dimension); null if codes are of single columns
  std::vector<FeedbackPart> parts;  // of each block; none if there is one
};

// Some rows of a weight, in natural order, and what is found for them.
struct FeedbackRows {
  const float* w;  // (rows, columns)
  size_t rows;
  int passes, refits;
  const float *scale, *offset;  // (rows, columns), where they are given and not fitted; null: the offset is zero
  void* codes;                  // (rows, columns / dimension) uint8, of points int32
  std::vector<uint8_t*> grid;   // (rows, blocks) of each field that is fitted
};

// Rounds rows from `begin` on. `fitter` null: scales are given. False if a weight is not a number that the fit can take.
bool feed_back(const FeedbackOrder& order, const FeedbackRows& rows, const Fitter* fitter, const std::string& isa,
               const FeedbackLevels& levels, size_t begin, size_t end);
bool feed_back(const FeedbackOrder& order, const FeedbackRows& rows, const Fitter* fitter, const std::string& isa,
               const vectors::Book& book, int attempts, size_t begin, size_t end);

}  // namespace fewbits
