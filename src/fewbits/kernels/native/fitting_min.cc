// The search of fitting/__init__.py for a scale and a minimum: 31 starting lines, each fitted twice to its own codes. A fit takes
// fifteen operations per weight. Measured with AVX2 and an importance, the call from Python included: 35 ns per weight of 576
// groups of 32 (torch: 840), 34 of 8192 groups (torch: 390).
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cmath>

#include "fitting.h"

namespace fewbits {
namespace fitting {
namespace {

struct MinSearch {
  float top;
  bool float16, search;
  const float* kept;  // (below, above) of the range, each
  size_t kept_count;
  const float* insets;  // (below, steps in the range), each
  size_t inset_count;
};

struct Line {
  F32x8 scale, minimum;
};

// The codes of a line: their products with the weights, themselves, their squares. A code of zero keeps the sign that rounding
// gives it, because where all are zero the sign reaches the scale.
struct Codes {
  const F32x8* centred;
  const F32x8* weight;
  F32x8 minimum, inverted, top;

  FEWBITS_INLINE void operator()(size_t i, F32x8* sums) const {
    const F32x8 near = at_most(at_least((centred[i] + minimum) * inverted, all(-1.0f)), top);
    const F32x8 code = at_least(with_sign((near + kRounder) - kRounder, near), F32x8{});
    sums[0] = code * centred[i] * weight[i];
    sums[1] = code * weight[i];
    sums[2] = code * code * weight[i];
  }
};

struct Plain {
  const F32x8* centred;
  const F32x8* weight;

  FEWBITS_INLINE void operator()(size_t i, F32x8* sums) const {
    sums[0] = weight[i];
    sums[1] = centred[i] * weight[i];
  }
};

FEWBITS_INLINE Line stored(const Line& line, const MinSearch& given) {
  return given.float16 ? Line{float16_scale(line.scale), as_float16(line.minimum)} : line;
}

FEWBITS_INLINE Line starting(const MinSearch& given, size_t k, const F32x8& low, const F32x8& high) {
  if (k < given.kept_count) {
    const float below = given.kept[2 * k], above = given.kept[2 * k + 1];
    return {(high * above - low * below) / given.top, -low * below};
  }
  const float* const inset = given.insets + 2 * (k - given.kept_count);
  const F32x8 scale = (high - low) / inset[1];
  return {scale, inset[0] * scale - low};
}

FEWBITS_INLINE Line search_line(const Tile& tile, const MinSearch& given) {
  F32x8 low, high;
  find_extremes(tile, low, high);
  if (!given.float16) {
    low = at_most(low, F32x8{});
    high = at_least(high, F32x8{});
  }
  const Line textbook = stored({(high - low) / given.top, -low}, given);
  if (!given.search) return textbook;

  const F32x8 middle = given.float16 ? (low + high) / 2.0f : F32x8{};
  low -= middle;
  high -= middle;
  for (size_t i = 0; i < tile.n; ++i) tile.centred[i] = tile.x[i] - middle;
  const Sums<2> plain = sum<2>(tile, Plain{tile.centred, tile.weight});
  const F32x8 sum_w = plain.of[0], sum_x = plain.of[1];
  F32x8 best_gain = all(-INFINITY);
  Line best = textbook, line = {};
  for (size_t k = 0; k < 2 * (given.kept_count + given.inset_count); ++k) {
    if (k % 2 == 0) line = starting(given, k / 2, low, high);
    const Sums<3> sums = sum<3>(tile, Codes{tile.centred, tile.weight, line.minimum, inverse(line.scale), all(given.top)});
    const F32x8 sum_qx = sums.of[0], sum_q = sums.of[1], sum_qq = sums.of[2];
    const F32x8 determinant = sum_w * sum_qq - sum_q * sum_q, divisor = safe(determinant);
    const I32x8 solvable = determinant > 1e-6f * sum_w * sum_qq;
    F32x8 slope = solvable ? (sum_w * sum_qx - sum_q * sum_x) / divisor : line.scale;
    F32x8 base = solvable ? (sum_qq * sum_x - sum_q * sum_qx) / divisor : -line.minimum;
    if (!given.float16) {
      slope = at_least(base > 0 ? sum_qx / safe(sum_qq) : slope, F32x8{});
      base = at_most(base, F32x8{});
    }
    const F32x8 cross = slope * sum_qx + base * sum_x - slope * base * sum_q;
    const F32x8 gain = 2.0f * cross - slope * slope * sum_qq - base * base * sum_w;
    const I32x8 better = gain > best_gain;
    best_gain = better ? gain : best_gain;
    best.scale = better ? slope : best.scale;
    best.minimum = better ? -base - middle : best.minimum;
    line = {slope, -base};
  }
  best = stored(best, given);
  const Consecutive codes{F32x8{}, all(given.top)};
  const F32x8 error = error_of(tile, codes, best.scale, -best.minimum);
  const I32x8 better = error < error_of(tile, codes, textbook.scale, -textbook.minimum);
  return {better ? best.scale : textbook.scale, better ? best.minimum : textbook.minimum};
}

FEWBITS_INLINE void search_min(const Tile& tile, const MinSearch& given, float* scale, float* minimum) {
  const Line found = search_line(tile, given);
  store(found.scale, scale);
  store(found.minimum, minimum);
}

void search_min_scalar(const Tile& tile, const MinSearch& given, float* scale, float* minimum) {
  search_min(tile, given, scale, minimum);
}
#if defined(__x86_64__)
FEWBITS_AVX2 void search_min_avx2(const Tile& tile, const MinSearch& given, float* scale, float* minimum) {
  search_min(tile, given, scale, minimum);
}
#endif

using SearchMin = void (*)(const Tile&, const MinSearch&, float* scale, float* minimum);

SearchMin find(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx2" && has_avx2()) return search_min_avx2;
#endif
  if (isa == "scalar") return search_min_scalar;
  throw std::invalid_argument("no " + isa + " kernel searches for scales and minima here");
}

// False where a weight is NaN, and what is found is void then.
bool fit_scale_and_min(const std::string& isa, const Floats& x, const std::optional<Floats>& importance, int top, bool float16,
                       const Floats& kept, const Floats& insets, bool search, FloatsInto scale, FloatsInto minimum, int threads) {
  const SearchMin search_tile = find(isa);
  const Weights weights(x, importance);
  if (scale.shape(0) != weights.groups || minimum.shape(0) != weights.groups)
    throw std::invalid_argument("there is one scale and one minimum for each group");
  if (kept.shape(1) != 2 || insets.shape(1) != 2) throw std::invalid_argument("a start is two numbers");
  if (top < 1 || top > 1 << 20) throw std::invalid_argument("the largest code is 1 to a million");
  const MinSearch given{static_cast<float>(top), float16, search, kept.data(), kept.shape(0), insets.data(), insets.shape(0)};
  float* const scales = scale.data();
  float* const minima = minimum.data();
  nb::gil_scoped_release released;
  return for_tiles(weights, threads, [&](const Tile& tile, size_t first) {
    float of_scale[kLanes], of_minimum[kLanes];
    search_tile(tile, given, of_scale, of_minimum);
    take(of_scale, first, weights.groups, scales);
    take(of_minimum, first, weights.groups, minima);
  });
}

}  // namespace
}  // namespace fitting

void register_fitting_min(nanobind::module_& m) {
  namespace nb = nanobind;
  m.def("fit_scale_and_min", &fitting::fit_scale_and_min, nb::arg("isa"), nb::arg("x").noconvert(),
        nb::arg("importance").noconvert().none(), nb::arg("top"), nb::arg("float16"), nb::arg("kept").noconvert(),
        nb::arg("insets").noconvert(), nb::arg("search"), nb::arg("scale").noconvert(), nb::arg("minimum").noconvert(),
        nb::arg("threads"));
}

}  // namespace fewbits
