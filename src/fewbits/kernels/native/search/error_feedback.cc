// Error feedback: visits the columns of a tile one after another, rounds each to its target, and moves the targets of later ones
// by the error.
//
// Layout: all arrays are (columns, rows), so that neighbouring lanes are rows, which are independent. A strip of 64 rows and up
// to 128 columns keeps its changes (32 KB) in the first-level cache; a column's target adds all changes before it at once.
// Arithmetic: n / 2 multiply-adds per weight in a tile of n columns, a division and a search for the level. Measured for q4_0
// over tiles of 32 and 128 columns, calls from Python included: 7 ns per weight and visit with AVX2.
#include <algorithm>
#include <cmath>

#include "platform/avx512.h"
#include "search/feedback.h"

namespace fewbits {
namespace {

constexpr size_t kLanes = 64;
constexpr float kRounder = 0x1.8p23f;  // adding and subtracting it rounds to even, for magnitudes below 2^22

struct Lanes {
  alignas(64) float x[kLanes];      // the target in units of the scale
  alignas(64) float level[kLanes];  // the nearest level to it
  alignas(64) int32_t code[kLanes];
};

// Always inlined, so that each instruction set compiles its own version.
#define FEWBITS_INLINE inline __attribute__((always_inline))

FEWBITS_INLINE void nearest_consecutive(const FeedbackLevels& levels, Lanes& lanes) {
  const float low = levels.values[0], high = levels.values[levels.count - 1];
  for (size_t r = 0; r < kLanes; ++r) {
    const float inside = std::min(std::max(lanes.x[r], low), high);  // the ends are integers: clamping first changes nothing
    const float level = (inside + kRounder) - kRounder;
    lanes.level[r] = level;
    lanes.code[r] = static_cast<int32_t>(level - low);
  }
}

FEWBITS_INLINE void nearest_counted(const FeedbackLevels& levels, Lanes& lanes) {
  for (size_t r = 0; r < kLanes; ++r) {
    lanes.level[r] = levels.values[0];
    lanes.code[r] = levels.codes[0];
  }
  for (size_t i = 0; i + 1 < levels.count; ++i) {
    const float boundary = levels.boundaries[i], value = levels.values[i + 1];
    const int32_t code = levels.codes[i + 1];
    for (size_t r = 0; r < kLanes; ++r) {
      const bool passed = lanes.x[r] > boundary;
      lanes.level[r] = passed ? value : lanes.level[r];
      lanes.code[r] = passed ? code : lanes.code[r];
    }
  }
}

FEWBITS_INLINE void nearest_searched(const FeedbackLevels& levels, Lanes& lanes) {
  for (size_t r = 0; r < kLanes; ++r) {
    const float* const end = levels.boundaries + levels.count - 1;
    const size_t i = std::lower_bound(levels.boundaries, end, lanes.x[r]) - levels.boundaries;  // boundaries below x
    lanes.level[r] = levels.values[i];
    lanes.code[r] = levels.codes[i];
  }
}

// Formats with a minus zero keep the sign of the value that is rounded.
FEWBITS_INLINE void sign_zeros(const FeedbackLevels& levels, Lanes& lanes) {
  for (size_t r = 0; r < kLanes; ++r) {
    if (lanes.level[r] == 0 && std::signbit(lanes.x[r])) {
      lanes.level[r] = -0.0f;
      lanes.code[r] = levels.minus_zero;
    }
  }
}

// Lanes beyond the last row compute with zeros and are discarded.
FEWBITS_INLINE void load_lanes(const float* from, size_t count, float* lanes) {
  for (size_t r = 0; r < kLanes; ++r) lanes[r] = r < count ? from[r] : 0.0f;
}

FEWBITS_INLINE void visit_strip(const FeedbackTile& tile, const FeedbackLevels& levels, size_t first, size_t count) {
  alignas(64) float changes[kFeedbackColumns][kLanes];
  alignas(64) float target[kLanes], weight[kLanes], scale[kLanes], offset[kLanes], error[kLanes];
  Lanes lanes;
  for (size_t k = 0; k < tile.columns; ++k) {
    const size_t at = k * tile.rows + first;
    load_lanes(tile.targets + at, count, target);
    const float* const coupling = tile.coupling + k * tile.coupling_stride;
    for (size_t i = 0; i < k; ++i)
      for (size_t r = 0; r < kLanes; ++r) target[r] += coupling[i] * changes[i][r];

    load_lanes(tile.weights + at, count, weight);
    load_lanes(tile.errors + at, count, error);
    load_lanes(tile.scale + at, count, scale);
    if (tile.offset) load_lanes(tile.offset + at, count, offset);
    // with a scale of zero every level gives the offset: dividing by infinity makes every target zero
    for (size_t r = 0; r < kLanes; ++r)
      lanes.x[r] = (tile.offset ? target[r] - offset[r] : target[r]) / (scale[r] == 0 ? INFINITY : scale[r]);
    if (levels.consecutive)
      nearest_consecutive(levels, lanes);
    else if (levels.count <= 16)
      nearest_counted(levels, lanes);
    else
      nearest_searched(levels, lanes);
    if (levels.minus_zero >= 0) sign_zeros(levels, lanes);

    const auto decoded = [&](float level, size_t r) {
      const float value = level * scale[r];
      return tile.offset ? value + offset[r] : value;
    };
    uint8_t* const codes = tile.codes + at;
    if (tile.keep) {
      for (size_t r = 0; r < count; ++r) {
        const float value = decoded(lanes.level[r], r), present = decoded(levels.by_code[codes[r]], r);
        const bool nearer = std::fabs(target[r] - value) < std::fabs(target[r] - present);
        const float now = nearer ? weight[r] - value : error[r];
        changes[k][r] = now - error[r];
        tile.errors[at + r] = now;
        codes[r] = nearer ? static_cast<uint8_t>(lanes.code[r]) : codes[r];
      }
      for (size_t r = count; r < kLanes; ++r) changes[k][r] = 0;
    } else {
      for (size_t r = 0; r < kLanes; ++r) {
        const float now = weight[r] - decoded(lanes.level[r], r);
        changes[k][r] = now - error[r];
        error[r] = now;
      }
      for (size_t r = 0; r < count; ++r) {
        tile.errors[at + r] = error[r];
        codes[r] = static_cast<uint8_t>(lanes.code[r]);
      }
    }
  }
}

void visit_scalar(const FeedbackTile& tile, const FeedbackLevels& levels, size_t first, size_t count) {
  visit_strip(tile, levels, first, count);
}

#if defined(__x86_64__)
FEWBITS_AVX2 void visit_avx2(const FeedbackTile& tile, const FeedbackLevels& levels, size_t first, size_t count) {
  visit_strip(tile, levels, first, count);
}

FEWBITS_AVX512 void visit_avx512(const FeedbackTile& tile, const FeedbackLevels& levels, size_t first, size_t count) {
  visit_strip(tile, levels, first, count);
}
#endif

}  // namespace

size_t feedback_strips(size_t rows) { return (rows + kLanes - 1) / kLanes; }

FeedbackVisit find_feedback(const char* isa) {
#if defined(__x86_64__)
  if (!std::strcmp(isa, "avx512") && has_avx512()) return visit_avx512;
  if (!std::strcmp(isa, "avx2") && has_avx2()) return visit_avx2;
#endif
  return std::strcmp(isa, "scalar") ? nullptr : visit_scalar;
}

void visit_feedback_strip(FeedbackVisit visit, const FeedbackTile& tile, const FeedbackLevels& levels, size_t strip) {
  const size_t first = strip * kLanes;
  visit(tile, levels, first, std::min(kLanes, tile.rows - first));
}

}  // namespace fewbits
