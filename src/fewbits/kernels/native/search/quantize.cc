// The Python bindings of the searches in integers: check every size, release the interpreter lock, and pass groups to a search.
#include "search/quantize.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <stdexcept>

#include "platform/threads.h"

namespace nb = nanobind;

namespace fewbits {
namespace quantize {
namespace {

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename Number>
using Into = nb::ndarray<Number, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using List = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename Listed, typename Number>
Listed listed(const std::vector<Number>& numbers, size_t multiple = 1) {
  Listed found{};
  if (numbers.size() > std::size(found.at) || numbers.size() % multiple)
    throw std::invalid_argument("a list of trials has " + std::to_string(numbers.size()) + " entries");
  std::copy(numbers.begin(), numbers.end(), found.at);
  found.count = numbers.size();
  return found;
}

bool are_within(const Integers& numbers, int low, int high) {
  return std::all_of(numbers.at, numbers.at + numbers.count, [&](int number) { return number >= low && number <= high; });
}

// Whether each of 32 cells holds at most one threshold: see `Uneven` in quantize_scale.inc, which has the same cells.
bool are_apart(const ScaleSearch& search) {
  const int reach = std::max(search.high, -search.low) * (1 << search.bits);
  int shift = 0;
  while (16 << shift <= reach) ++shift;
  for (size_t i = 1; i < search.thresholds.count; ++i)
    if (search.thresholds.at[i] >> shift <= search.thresholds.at[i - 1] >> shift) return false;
  return true;
}

ScaleSearch scale_search(int bits, int low, int high, const std::vector<int>& levels, const std::vector<int>& thresholds,
                         float end, bool one_end, bool float16, const std::vector<int>& inverses,
                         const std::vector<float>& around) {
  const ScaleSearch made{bits, low,     high,    listed<Integers>(levels),   listed<Integers>(thresholds),
                         end,  one_end, float16, listed<Integers>(inverses), listed<Floats>(around)};
  needs(bits >= 1 && bits <= 12 && low >= -128 && low < high && high <= 128, "levels lie from -128 to 128");
  needs(std::max(high, -low) * (1 << bits) <= 32767 && are_within(made.inverses, -32767, 32767),
        "16 bits do not hold these places");
  needs(levels.empty() ? thresholds.empty() : levels.size() <= 16 && thresholds.size() + 1 == levels.size(),
        "a threshold is between levels");
  needs(are_within(made.levels, std::max(low, -128), std::min(high, 127)) || levels.empty(), "levels lie between the outermost");
  needs(are_apart(made), "thresholds are too near to each other");
  return made;
}

LineSearch line_search(int top, int bits, bool float16, const std::vector<float>& kept, const std::vector<int>& starts) {
  const LineSearch made{top, bits, float16, listed<Floats>(kept, 2), listed<Integers>(starts, 2)};
  needs(bits >= 1 && bits <= 12 && top >= 1 && top <= 128 && top << bits <= 32767, "a code is 128 at most");
  needs(are_within(made.starts, 0, 32767), "16 bits do not hold these lines");
  return made;
}

ScaleUnits scale_units(size_t per_super, int low, int high, const std::vector<float>& ends, const std::vector<int>& steps,
                       int rounds) {
  needs(per_super >= 1 && per_super <= kMostSubs, "a super-block has 16 groups at most");
  needs(low >= -128 && low < high && high <= 127, "a sub-scale is a signed byte");
  return {per_super, low, high, listed<Floats>(ends), listed<Integers>(steps), rounds};
}

LineUnits line_units(size_t per_super, int largest, const std::vector<float>& ends, const std::vector<float>& factors,
                     const std::vector<int>& steps, int rounds) {
  needs(per_super >= 1 && per_super <= kMostSubs, "a super-block has 16 groups at most");
  needs(largest >= 1 && largest <= 255, "a sub-scale is a byte");
  const LineUnits made{per_super, largest, listed<Floats>(ends), listed<Floats>(factors, 2), listed<Integers>(steps, 2), rounds};
  needs(are_within(made.steps, -2, 2), "neighbours are two steps away at most");
  return made;
}

Codes codes(float first, float last, const std::vector<float>& boundaries, const std::vector<int>& order,
            const std::vector<float>& levels) {
  const Codes made{first, last, listed<Floats>(boundaries), listed<Integers>(order), listed<Floats>(levels)};
  needs(levels.size() == order.size(), "each code has a level");
  needs(boundaries.empty() ? first >= -32768 && last - first >= 0 && last - first <= 255 : order.size() == boundaries.size() + 1,
        "a code is a byte");
  needs(are_within(made.order, 0, 255), "a code is a byte");
  return made;
}

ExponentSearch exponent_search(int beyond, const std::vector<int>& steps) {
  const ExponentSearch made{beyond, listed<Integers>(steps)};
  needs(beyond >= -254 && beyond <= 254 && are_within(made.steps, -254, 254) && !steps.empty(), "an exponent is a byte");
  return made;
}

Source source_of(const Matrix& x, const std::optional<Matrix>& importance) {
  const Source source{x.data(), x.shape(1), importance ? importance->data() : nullptr, importance ? importance->shape(0) : 1};
  needs(source.n >= 2 && source.n <= kMost && source.n % 2 == 0, "a group has 2 to 256 weights, an even number");
  if (importance && (importance->shape(1) != source.n || source.periods == 0 || x.shape(0) % source.periods))
    throw std::invalid_argument("the importance has " + std::to_string(source.periods) + " x " +
                                std::to_string(importance->shape(1)) + " entries for " + std::to_string(x.shape(0)) + " x " +
                                std::to_string(source.n) + " weights");
  return source;
}

// Calls work(begin, end) over `count` items of `weights` each, in shares; false if a share returns false. Items are independent,
// so the result does not depend on the number of threads; shares begin at whole registers of lanes.
template <typename Work>
bool in_shares(size_t count, size_t weights, int threads, const Work& work) {
  constexpr size_t kWorthAThread = 1 << 13, kTile = 16;
  const size_t tiles = (count + kTile - 1) / kTile;
  const size_t shares = shares_of(threads, std::min(tiles, count * weights / kWorthAThread));
  std::atomic<bool> numbers = true;
  run_shares(shares, [&](size_t i) {
    const size_t begin = tiles * i / shares * kTile, end = std::min(count, tiles * (i + 1) / shares * kTile);
    if (begin < end && !work(begin, end)) numbers = false;
  });
  return numbers;
}

bool fit_scale(const std::string& isa, const Matrix& x, const std::optional<Matrix>& importance, const ScaleSearch& search,
               Into<float> scale, int threads) {
  const Searches& searches = find_searches(isa);
  const Source source = source_of(x, importance);
  const size_t groups = x.shape(0);
  needs(scale.shape(0) == groups, "there is one scale for each group");
  nb::gil_scoped_release released;
  return in_shares(groups, source.n, threads,
                   [&](size_t begin, size_t end) { return searches.scales(source, search, begin, end, scale.data()); });
}

bool fit_line(const std::string& isa, const Matrix& x, const std::optional<Matrix>& importance, const LineSearch& search,
              Into<float> scale, Into<float> minimum, int threads) {
  const Searches& searches = find_searches(isa);
  const Source source = source_of(x, importance);
  const size_t groups = x.shape(0);
  needs(scale.shape(0) == groups && minimum.shape(0) == groups, "there is one scale and one minimum for each group");
  nb::gil_scoped_release released;
  return in_shares(groups, source.n, threads, [&](size_t begin, size_t end) {
    return searches.lines(source, search, begin, end, scale.data(), minimum.data());
  });
}

size_t supers_of(const Matrix& x, size_t per_super) {
  needs(x.shape(0) % per_super == 0 && per_super * x.shape(1) <= kMost, "super-blocks are whole, of 256 weights at most");
  return x.shape(0) / per_super;
}

bool fit_sub_scales(const std::string& isa, const Matrix& x, const std::optional<Matrix>& importance, const ScaleSearch& search,
                    const ScaleUnits& units, const List& wanted, Into<int8_t> sub, Into<uint16_t> d, int threads) {
  const Searches& searches = find_searches(isa);
  const Source source = source_of(x, importance);
  const size_t groups = x.shape(0), supers = supers_of(x, units.per_super);
  needs(wanted.shape(0) == groups && sub.shape(0) == groups && d.shape(0) == supers,
        "there is a scale for each group, and one of scales");
  nb::gil_scoped_release released;
  return in_shares(supers, units.per_super * source.n, threads, [&](size_t begin, size_t end) {
    return searches.sub_scales(source, search, units, wanted.data(), begin, end, sub.data(), d.data());
  });
}

bool fit_sub_lines(const std::string& isa, const Matrix& x, const std::optional<Matrix>& importance, const LineSearch& search,
                   const LineUnits& units, const List& scale, const List& minimum, Into<uint8_t> sub, Into<uint8_t> sub_min,
                   Into<uint16_t> d, Into<uint16_t> dmin, int threads) {
  const Searches& searches = find_searches(isa);
  const Source source = source_of(x, importance);
  const size_t groups = x.shape(0), supers = supers_of(x, units.per_super);
  needs(scale.shape(0) == groups && minimum.shape(0) == groups && sub.shape(0) == groups && sub_min.shape(0) == groups &&
            d.shape(0) == supers && dmin.shape(0) == supers,
        "there is a scale and a minimum for each group, and one of each");
  nb::gil_scoped_release released;
  return in_shares(supers, units.per_super * source.n, threads, [&](size_t begin, size_t end) {
    return searches.sub_lines(source, search, units, scale.data(), minimum.data(), begin, end, sub.data(), sub_min.data(),
                              d.data(), dmin.data());
  });
}

}  // namespace
}  // namespace quantize

void register_quantize_rows(nb::module_& m);  // quantize_rows.cc

void register_quantize(nb::module_& m) {
  using namespace quantize;
  nb::class_<ScaleSearch>(m, "ScaleSearch");
  nb::class_<LineSearch>(m, "LineSearch");
  nb::class_<ScaleUnits>(m, "ScaleUnits");
  nb::class_<LineUnits>(m, "LineUnits");
  nb::class_<Codes>(m, "Codes");
  nb::class_<ExponentSearch>(m, "ExponentSearch");
  m.def("exponent_search", &exponent_search);
  m.def("scale_search", &scale_search);
  m.def("line_search", &line_search);
  m.def("scale_units", &scale_units);
  m.def("line_units", &line_units);
  m.def("codes", &quantize::codes);
  m.def("search_isas", &search_isas);
  // noconvert: a mismatched array must be refused, because a silent copy would be written instead of the caller's memory.
  m.def("fit_scale", &fit_scale, nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("importance").noconvert().none(),
        nb::arg("search"), nb::arg("scale").noconvert(), nb::arg("threads"));
  m.def("fit_line", &fit_line, nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("importance").noconvert().none(),
        nb::arg("search"), nb::arg("scale").noconvert(), nb::arg("minimum").noconvert(), nb::arg("threads"));
  m.def("fit_sub_scales", &fit_sub_scales, nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("importance").noconvert().none(),
        nb::arg("search"), nb::arg("units"), nb::arg("wanted").noconvert(), nb::arg("sub").noconvert(), nb::arg("d").noconvert(),
        nb::arg("threads"));
  m.def("fit_sub_lines", &fit_sub_lines, nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("importance").noconvert().none(),
        nb::arg("search"), nb::arg("units"), nb::arg("scale").noconvert(), nb::arg("minimum").noconvert(),
        nb::arg("sub").noconvert(), nb::arg("sub_min").noconvert(), nb::arg("d").noconvert(), nb::arg("dmin").noconvert(),
        nb::arg("threads"));
  register_quantize_rows(m);
}

}  // namespace fewbits
