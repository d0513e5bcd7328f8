// The search of formats/search/long_rows.py for a scale of hundreds of weights, whose sums 32 bits do not hold. A trial takes
// eleven operations per weight; 8 bits have some 30 trials.
#include "search/long_rows.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

namespace fewbits {

void register_quantize(nanobind::module_& m);  // quantize.cc

namespace search {
namespace {

// Rounding to other levels, where no midpoint between two levels is inside a cell.
struct Cells {
  float per_unit;
  F32x8 first, last;
  const float* zero;  // the level of the cell that begins at zero

  FEWBITS_INLINE F32x8 operator()(const F32x8& x) const {
    const F32x8 cells = x * per_unit;
    const F32x8 cell = at_most(cells > first ? cells : first, last);  // even a NaN, which no trial is, would be inside
    const I32x8 towards_zero = __builtin_convertvector(cell, I32x8);
    const I32x8 at = towards_zero + (cell < __builtin_convertvector(towards_zero, F32x8));  // true is -1
    return F32x8{zero[at[0]], zero[at[1]], zero[at[2]], zero[at[3]], zero[at[4]], zero[at[5]], zero[at[6]], zero[at[7]]};
  }
};

// The levels that a trial scale rounds to: their product with the weights, and their square.
template <typename Snap>
struct Projection {
  const F32x8* x;
  const F32x8* weight;
  Snap snap;
  F32x8 inverted;

  FEWBITS_INLINE void operator()(size_t i, F32x8* sums) const {
    const F32x8 level = snap(x[i] * inverted);
    sums[0] = level * x[i] * weight[i];
    sums[1] = level * level * weight[i];
  }
};

struct ScaleSearch {
  const float* cells;  // their levels, or null where levels are consecutive integers
  float low, high;     // the outermost integers, or the first and last cell
  float per_unit;      // cells per unit
  float end;           // the level that round-to-nearest gives the largest weight
  bool one_end;
  const float* places;
  size_t place_count;
  const float* around;
  size_t around_count;
};

template <typename Snap>
FEWBITS_INLINE void consider(const Tile& tile, const Snap& snap, const F32x8& trial, F32x8& wanted, F32x8& most) {
  const Sums<2> sums = sum<2>(tile, Projection<Snap>{tile.x, tile.weight, snap, inverse(trial)});
  const F32x8 along = sums.of[0], scale = along / safe(sums.of[1]), gain = along * scale;
  wanted = gain > most ? scale : wanted;
  most = gain > most ? gain : most;
}

template <typename Snap>
FEWBITS_INLINE F32x8 search_levels(const Tile& tile, const Snap& snap, const ScaleSearch& given) {
  F32x8 low, high;
  find_extremes(tile, low, high);
  F32x8 peak = -low > high ? low : high;
  if (given.one_end) peak = magnitude(peak);
  F32x8 best = float16_scale(peak / given.end);

  F32x8 wanted = best, most = {};
  const size_t trials = given.place_count + given.around_count;
  for (size_t k = 0; k < trials; ++k) {  // a single call of `consider`, because it is inlined
    const bool placed = k < given.place_count;
    consider(tile, snap, placed ? peak / given.places[k] : wanted * given.around[k - given.place_count], wanted, most);
  }
  F32x8 error = error_of(tile, snap, best, F32x8{});
  for (const float step : {0.0f, kFloat16Step}) {
    const F32x8 trial = float16_scale(wanted + step_along(wanted, step)), trial_error = error_of(tile, snap, trial, F32x8{});
    best = trial_error < error ? trial : best;
    error = trial_error < error ? trial_error : error;
  }
  return best;
}

FEWBITS_INLINE void search_scale(const Tile& tile, const ScaleSearch& given, float* best) {
  const F32x8 low = all(given.low), high = all(given.high);
  F32x8 found;
  if (given.cells)
    found = search_levels(tile, Cells{given.per_unit, low, high, given.cells - static_cast<ptrdiff_t>(given.low)}, given);
  else
    found = search_levels(tile, Consecutive{low, high}, given);
  store(found, best);
}

void search_scale_scalar(const Tile& tile, const ScaleSearch& given, float* best) { search_scale(tile, given, best); }
#if defined(__x86_64__)
FEWBITS_AVX2 void search_scale_avx2(const Tile& tile, const ScaleSearch& given, float* best) { search_scale(tile, given, best); }
#endif

using SearchScale = void (*)(const Tile&, const ScaleSearch&, float* best);

SearchScale find(const std::string& isa) {
#if defined(__x86_64__)
  if ((isa == "avx2" || isa == "avx512") && has_avx2()) return search_scale_avx2;
#endif
  if (isa == "scalar") return search_scale_scalar;
  throw std::invalid_argument("no " + isa + " kernel searches for scales here");
}

// `cells` has the level of each cell, half of them below zero, per_unit of them per unit; none: consecutive integers, low to
// high. False if a weight is NaN; `scale` is then void.
bool fit_long_scale(const std::string& isa, const Floats& x, const std::optional<Floats>& importance,
                    const std::optional<FloatList>& cells, float low, float high, float per_unit, float end, bool one_end,
                    const FloatList& places, const FloatList& around, FloatsInto scale, int threads) {
  const SearchScale search_tile = find(isa);
  const Weights weights(x, importance);
  if (scale.shape(0) != weights.groups) throw std::invalid_argument("there is one scale for each group");
  ScaleSearch given{nullptr, low, high, per_unit, end, one_end, places.data(), places.shape(0), around.data(), around.shape(0)};
  if (cells) {
    const size_t count = cells->shape(0);
    if (count < 2 || count % 2 || count > 1 << 20) throw std::invalid_argument("cells come in two halves, a million at most");
    given.cells = cells->data();
    given.low = -static_cast<float>(count / 2);
    given.high = static_cast<float>(count / 2 - 1);
  }
  float* const into = scale.data();
  nb::gil_scoped_release released;
  return for_tiles(weights, threads, [&](const Tile& tile, size_t first) {
    float best[kLanes];
    search_tile(tile, given, best);
    take(best, first, weights.groups, into);
  });
}

}  // namespace
}  // namespace search

void register_search(nanobind::module_& m) {
  namespace nb = nanobind;
  // noconvert: a mismatched array must be refused, because a silent copy would be written instead of the caller's memory.
  m.def("fit_long_scale", &search::fit_long_scale, nb::arg("isa"), nb::arg("x").noconvert(),
        nb::arg("importance").noconvert().none(), nb::arg("cells").noconvert().none(), nb::arg("low"), nb::arg("high"),
        nb::arg("per_unit"), nb::arg("end"), nb::arg("one_end"), nb::arg("places").noconvert(), nb::arg("around").noconvert(),
        nb::arg("scale").noconvert(), nb::arg("threads"));
  register_quantize(m);
}

}  // namespace fewbits
