// What the native search of formats/search/long_rows.py needs: tiles of groups, sums by folding, and rounding. The same
// operations in the same order give the same bits as torch.
//
// Layout: a tile is 8 groups, which are the lanes, by n weights; it stays in the first-level cache (n = 128: 8 KB, its weighting
// included) while all trials run over it. The first step of a sum by folding is done as its terms are computed, so that only a
// quarter of them is stored.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "platform/avx2.h"
#include "platform/threads.h"

namespace fewbits::search {

namespace nb = nanobind;

constexpr size_t kLanes = 8;
constexpr float kRounder = 0x1.8p23f;  // adding and subtracting it rounds to even, for magnitudes below 2^22
constexpr float kFloat16Max = 65504.0f, kFloat16Step = 0x1p-24f;  // as in formats/search
constexpr float kLargest = 1e14f;
constexpr float kTiny = 1e-37f;

// Eight lanes, which each instruction set compiles for its registers. Everything is inlined, so that each compiles its own
// version; the compiler's warnings about passing and returning eight floats are about calls that are inlined.
using F32x8 = float __attribute__((vector_size(32)));
using I32x8 = int32_t __attribute__((vector_size(32)));
#define FEWBITS_INLINE inline __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wpsabi"

FEWBITS_INLINE F32x8 all(float value) { return F32x8{} + value; }  // + 0 changes no value but -0, which is not used
FEWBITS_INLINE F32x8 magnitude(const F32x8& x) { return F32x8(I32x8(x) & 0x7fffffff); }

// Both keep NaN and the sign of a zero, as torch's clamp does.
FEWBITS_INLINE F32x8 at_least(const F32x8& x, const F32x8& low) { return x < low ? low : x; }
FEWBITS_INLINE F32x8 at_most(const F32x8& x, const F32x8& high) { return x > high ? high : x; }

FEWBITS_INLINE F32x8 with_sign(const F32x8& size, const F32x8& sign) { return F32x8(I32x8(size) | (I32x8(sign) & INT32_MIN)); }

// `step` with the sign of x; zero if x is zero.
FEWBITS_INLINE F32x8 step_along(const F32x8& x, float step) { return x == 0 ? F32x8{} : with_sign(all(step), x); }

FEWBITS_INLINE F32x8 inverse(const F32x8& scale) { return magnitude(scale) < kTiny ? F32x8{} : 1.0f / scale; }

FEWBITS_INLINE F32x8 safe(const F32x8& divisor) { return divisor == 0 ? all(1.0f) : divisor; }

FEWBITS_INLINE F32x8 as_float16(const F32x8& value) {
  const F32x8 size = at_most(magnitude(value), all(kFloat16Max));
  const I32x8 bits = I32x8(size);
  const F32x8 normal = F32x8((bits + 0xfff + ((bits >> 13) & 1)) & ~0x1fff);  // 10 bits of fraction, ties to even
  const F32x8 subnormal = (size + 0.5f) - 0.5f;                               // the steps of [0.5, 1) are 2^-24
  return with_sign(size < 0x1p-14f ? subnormal : normal, value);
}

FEWBITS_INLINE F32x8 float16_scale(const F32x8& scale) {
  return magnitude(scale) < kFloat16Step ? step_along(scale, kFloat16Step) : as_float16(scale);
}

// Rounding to consecutive integers. The sign of a zero may differ from torch's: no square and no error depends on it.
struct Consecutive {
  F32x8 low, high;

  FEWBITS_INLINE F32x8 operator()(const F32x8& x) const {
    return (at_most(at_least(x, low), high) + kRounder) - kRounder;  // the ends are integers: clamping first changes nothing
  }
};

// n weights of each lane's group, and their weighting; the sums have space for n / 2 each.
struct Tile {
  size_t n;
  F32x8* x;
  F32x8* weight;
  F32x8* sums[2];
};

FEWBITS_INLINE size_t ways_of(size_t n) { return n % 4 == 0 ? 4 : 2; }

// `total` of formats/search/groups.py.
FEWBITS_INLINE F32x8 fold(F32x8* values, size_t n) {
  while (n > 1) {
    const size_t part = n / ways_of(n);
    if (n % 4 == 0)
      for (size_t i = 0; i < part; ++i)
        values[i] = ((values[i] + values[i + part]) + values[i + 2 * part]) + values[i + 3 * part];
    else
      for (size_t i = 0; i < part; ++i) values[i] += values[i + part];
    if (n % 2) values[0] += values[n - 1];
    n = part;
  }
  return values[0];
}

template <size_t kSums>
struct Sums {
  F32x8 of[kSums];
};

// The total of `term`, which gives kSums values for the i-th weight of each lane's group.
template <size_t kSums, size_t kWays, typename Term>
FEWBITS_INLINE Sums<kSums> sum_in(const Tile& tile, const Term& term) {
  const size_t part = tile.n / kWays;
  for (size_t i = 0; i < part; ++i) {
    F32x8 sum[kSums], more[kSums];
    term(i, sum);
    for (size_t way = 1; way < kWays; ++way) {
      term(i + way * part, more);
      for (size_t k = 0; k < kSums; ++k) sum[k] += more[k];
    }
    for (size_t k = 0; k < kSums; ++k) tile.sums[k][i] = sum[k];
  }
  if (tile.n % kWays) {
    F32x8 more[kSums];
    term(tile.n - 1, more);
    for (size_t k = 0; k < kSums; ++k) tile.sums[k][0] += more[k];
  }
  Sums<kSums> found;
  for (size_t k = 0; k < kSums; ++k) found.of[k] = fold(tile.sums[k], part);
  return found;
}

template <size_t kSums, typename Term>
FEWBITS_INLINE Sums<kSums> sum(const Tile& tile, const Term& term) {
  return ways_of(tile.n) == 4 ? sum_in<kSums, 4>(tile, term) : sum_in<kSums, 2>(tile, term);
}

template <typename Snap>
struct SquaredError {
  const F32x8* x;
  const F32x8* weight;
  Snap snap;
  F32x8 scale, inverted, offset;

  FEWBITS_INLINE void operator()(size_t i, F32x8* sums) const {
    const F32x8 off = snap((x[i] - offset) * inverted) * scale + offset - x[i];  // an offset of zero changes nothing
    sums[0] = off * off * weight[i];
  }
};

template <typename Snap>
FEWBITS_INLINE F32x8 error_of(const Tile& tile, const Snap& snap, const F32x8& scale, const F32x8& offset) {
  return sum<1>(tile, SquaredError<Snap>{tile.x, tile.weight, snap, scale, inverse(scale), offset}).of[0];
}

// The smallest and the largest weight of each group, never a negative zero.
FEWBITS_INLINE void find_extremes(const Tile& tile, F32x8& low, F32x8& high) {
  low = high = tile.x[0];
  for (size_t i = 1; i < tile.n; ++i) {
    low = at_most(tile.x[i], low);
    high = at_least(tile.x[i], high);
  }
  low += 0.0f;
  high += 0.0f;
}

FEWBITS_INLINE void store(const F32x8& lanes, float* into) { std::memcpy(into, &lanes, sizeof lanes); }

using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatList = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatsInto = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Groups of weights, as rows; the weighting's rows repeat for the groups.
struct Weights {
  size_t groups, n, periods;
  const float* x;
  const float* weight;  // may be null: all equal

  Weights(const Floats& x, const std::optional<Floats>& importance)
      : groups(x.shape(0)),
        n(x.shape(1)),
        periods(importance ? importance->shape(0) : 1),
        x(x.data()),
        weight(importance ? importance->data() : nullptr) {
    if (n < 2) throw std::invalid_argument("a search for scales needs two weights in a group");
    if (importance && (importance->shape(1) != n || periods == 0 || groups % periods))
      throw std::invalid_argument("the importance has " + std::to_string(periods) + " x " + std::to_string(importance->shape(1)) +
                                  " entries for " + std::to_string(groups) + " x " + std::to_string(n) + " weights");
  }

  // Lanes beyond the last group compute with zeros and are discarded. False if a weight is NaN.
  bool load(size_t first, const Tile& tile) const {
    bool numbers = true;
    float* const x_lanes = reinterpret_cast<float*>(tile.x);  // a vector may be read and written as its floats
    float* const weight_lanes = reinterpret_cast<float*>(tile.weight);
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const size_t group = first + lane;
      for (size_t i = 0; i < n; ++i) {
        const float value = group < groups ? x[group * n + i] : 0.0f;
        numbers &= value == value;
        x_lanes[i * kLanes + lane] = std::min(std::max(value, -kLargest), kLargest);
      }
      if (periods == 1 && first != 0) continue;
      for (size_t i = 0; i < n; ++i) weight_lanes[i * kLanes + lane] = weight ? weight[group % periods * n + i] : 1.0f;
    }
    return numbers;
  }
};

// Runs `work(tile, first group)` over all groups; false if a weight is NaN (the result is then void). Groups are independent, so
// the result does not depend on the number of threads.
template <typename Work>
bool for_tiles(const Weights& weights, int threads, const Work& work) {
  constexpr size_t kWorthAThread = 1 << 13;  // weights: searching these takes far longer than waking a thread of the pool
  const size_t tiles = (weights.groups + kLanes - 1) / kLanes, n = weights.n;
  const size_t most = std::max<size_t>(1, std::min(tiles, weights.groups * n / kWorthAThread));
  const size_t shares = shares_of(threads, most);
  std::atomic<bool> numbers = true;
  const auto share = [&](size_t i) {
    const size_t half = n / 2, vectors = 2 * n + 2 * half;
    std::vector<float> room((vectors + 1) * kLanes);  // one more, because it is aligned to 16 bytes only
    const size_t beyond = reinterpret_cast<uintptr_t>(room.data()) % sizeof(F32x8) / sizeof(float);
    F32x8* const start = reinterpret_cast<F32x8*>(room.data() + (beyond ? kLanes - beyond : 0));
    F32x8* const sums = start + 2 * n;
    const Tile tile{n, start, start + n, {sums, sums + half}};
    if (weights.periods == 1) weights.load(0, tile);  // for the weighting, which later tiles share
    for (size_t t = tiles * i / shares; t < tiles * (i + 1) / shares && numbers; ++t) {
      if (weights.load(t * kLanes, tile))
        work(tile, t * kLanes);
      else
        numbers = false;
    }
  };
  run_shares(shares, share);
  return numbers;
}

inline void take(const float* lanes, size_t first, size_t groups, float* into) {
  std::copy_n(lanes, std::min(kLanes, groups - first), into + first);
}

}  // namespace fewbits::search
