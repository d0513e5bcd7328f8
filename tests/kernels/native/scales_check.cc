// Scales and codes of formats with levels (search/quantize.h): searches like those that Python makes, with fewer trials.
#include <cmath>

#include "search/quantize.h"
#include "searching.h"

namespace fewbits::checks {
namespace {

using namespace quantize;

template <typename Listed, typename Number>
Listed listed(const std::vector<Number>& numbers) {
  Listed made{};
  for (const Number number : numbers) made.at[made.count++] = number;
  return made;
}

// Two levels are the ends of consecutive ones; more are listed, with the thresholds between them.
ScaleSearch scale_search(int bits, const std::vector<int>& levels, const std::vector<int>& ends, bool float16) {
  ScaleSearch made{};
  made.bits = bits;
  made.low = levels.front();
  made.high = levels.back();
  if (levels.size() > 2) {
    made.levels = listed<Integers>(levels);
    std::vector<int> thresholds;
    for (size_t i = 1; i < levels.size(); ++i) thresholds.push_back((levels[i - 1] + levels[i]) * (1 << (bits - 1)));
    made.thresholds = listed<Integers>(thresholds);
  }
  made.end = static_cast<float>(ends[0]);
  made.one_end = ends.size() == 1;
  made.float16 = float16;
  std::vector<int> inverses;
  for (const int end : ends)
    for (const int percent : {70, 80, 90, 95, 100, 105, 110, 120, 150, 270, 500})
      inverses.push_back(end * (1 << bits) * percent / 100);
  made.inverses = listed<Integers>(inverses);
  made.around = listed<Floats>(std::vector<float>{0.97f, 1.03f, 1.0f});
  return made;
}

LineSearch line_search(int top, int bits, bool float16) {
  std::vector<int> starts;
  for (const int below : {14, 4, -6})  // in tenths of a step
    for (const int above : {9, -1, -6}) {
      const int steps = 10 * top + below + above;
      starts.push_back(8192 - below * 16384 / steps);
      starts.push_back((steps << (bits + 1)) / 10);
    }
  return {top, bits, float16, listed<Floats>(std::vector<float>{0.5f, 0.5f, 0.5f, 0.8f, 1.0f, 0.7f}), listed<Integers>(starts)};
}

const std::vector<int> kUneven{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
const std::vector<int> kSteps{-1, 1, -2, 2}, kStepsOfTwo{0, -1, 0, 1, -1, 0, 1, 0, -1, -1, 1, 1, 2, -2};

// Small floats of four bits: the codes of their values in order, and the middles between these.
Codes small_floats() {
  const std::vector<float> levels{-6, -4, -3, -2, -1.5f, -1, -0.5f, 0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  std::vector<float> middles;
  for (size_t i = 1; i < levels.size(); ++i) middles.push_back((levels[i - 1] + levels[i]) / 2);
  return {0, 0, listed<Floats>(middles), listed<Integers>(std::vector<int>{15, 14, 13, 12, 11, 10, 9, 0, 1, 2, 3, 4, 5, 6, 7}),
          listed<Floats>(levels)};
}

Codes consecutive(float first, float last) { return {first, last, {}, {}, {}}; }

constexpr size_t kWeights = kSearchedRows * kSearchedCols;

struct Given {
  const Guarded<float>& x;
  const Guarded<float>* importance;  // null: all equal

  Source source(size_t n) const {
    return {x.data(), n, importance ? importance->data() : nullptr, importance ? kSearchedCols / n : 1};
  }
};

void encode(const Searches& searches, const Given& given, size_t n, const Guarded<float>& scale, const float* offset,
            const Codes& codes, Results& results) {
  Guarded<uint8_t> found(kWeights);
  searches.encode(given.x.data(), kWeights / n, n, scale.data(), offset, codes, found.data());
  keep(results, "codes", found);
}

void one_scale(const Searches& searches, const Given& given, size_t n, const ScaleSearch& search, const Codes& codes,
               Results& results) {
  const size_t groups = kWeights / n;
  Guarded<float> scale(groups);
  if (!searches.scales(given.source(n), search, 0, groups, scale.data())) fail("a weight is no number");
  keep(results, "scales", scale);
  encode(searches, given, n, scale, nullptr, codes, results);
}

void one_line(const Searches& searches, const Given& given, size_t n, const LineSearch& search, Results& results) {
  const size_t groups = kWeights / n;
  Guarded<float> scale(groups), minimum(groups);
  if (!searches.lines(given.source(n), search, 0, groups, scale.data(), minimum.data())) fail("a weight is no number");
  keep(results, "scales", scale);
  keep(results, "minima", minimum);
  for (size_t i = 0; i < groups; ++i) minimum[i] = -minimum[i];
  encode(searches, given, n, scale, minimum.data(), consecutive(0, static_cast<float>(search.top)), results);
}

void super_scales(const Searches& searches, const Given& given, size_t n, const ScaleSearch& search, const ScaleUnits& units,
                  Results& results) {
  const size_t supers = kWeights / n / units.per_super;
  Guarded<int8_t> sub(supers * units.per_super);
  Guarded<uint16_t> d(supers);
  if (!searches.sub_scales(given.source(n), search, units, nullptr, 0, supers, sub.data(), d.data()))
    fail("a weight is no number");
  keep(results, "integers", sub);
  keep(results, "scales d", d);
}

void super_lines(const Searches& searches, const Given& given, size_t n, const LineSearch& search, const LineUnits& units,
                 Results& results) {
  const size_t supers = kWeights / n / units.per_super;
  Guarded<uint8_t> sub(supers * units.per_super), sub_min(supers * units.per_super);
  Guarded<uint16_t> d(supers), dmin(supers);
  if (!searches.sub_lines(given.source(n), search, units, nullptr, nullptr, 0, supers, sub.data(), sub_min.data(), d.data(),
                          dmin.data()))
    fail("a weight is no number");
  keep(results, "integers", sub);
  keep(results, "integers of minima", sub_min);
  keep(results, "scales d", d);
  keep(results, "scales dmin", dmin);
}

void exponents(const Searches& searches, const Given& given, size_t n, Results& results) {
  Guarded<uint8_t> code(kWeights / n);
  const ExponentSearch search{-2, listed<Integers>(std::vector<int>{0, -1, 1})};
  if (!searches.exponents(given.source(n), search, small_floats(), 0, code.size(), code.data())) fail("a weight is no number");
  keep(results, "exponents", code);
}

Floats ends_of(float end) { return listed<Floats>(std::vector<float>{end, end * 0.5f, end * 0.875f, end * 1.125f}); }

Results search_all(const Searches& searches, const Given& given) {
  Results results;
  for (const size_t n : {size_t{16}, size_t{32}, size_t{256}}) {
    one_scale(searches, given, n, scale_search(9, {-8, 7}, {-8}, true), consecutive(-8, 7), results);
    one_scale(searches, given, n, scale_search(5, {-128, 127}, {127}, false), consecutive(-128, 127), results);
    one_scale(searches, given, n, scale_search(5, kUneven, {-127, 113}, true), small_floats(), results);
    one_line(searches, given, n, line_search(15, 9, true), results);
    exponents(searches, given, n, results);
  }
  const Floats factors = listed<Floats>(std::vector<float>{0.9f, 1.0f, 1.0f, 1.1f});
  super_scales(searches, given, 16, scale_search(7, {-32, 31}, {-32, 31}, false),
               {16, -128, 127, ends_of(-128), listed<Integers>(kSteps), 1}, results);
  super_scales(searches, given, 32, scale_search(5, kUneven, {-127, 113}, false),
               {8, -32, 31, ends_of(31), listed<Integers>(kSteps), 1}, results);
  super_lines(searches, given, 32, line_search(15, 9, false), {8, 63, ends_of(63), factors, listed<Integers>(kStepsOfTwo), 2},
              results);
  super_lines(searches, given, 16, line_search(3, 11, false), {16, 15, ends_of(15), factors, listed<Integers>(kStepsOfTwo), 2},
              results);
  return results;
}

}  // namespace

void check_scales(Digest& digest) {
  for (const bool weighted : {false, true}) {
    Random random(weighted ? 11 : 12);
    const Guarded<float> x = draw_rows(random), importance = draw_importance(weighted, random);
    const Given given{x, weighted ? &importance : nullptr};
    check_same(digest, weighted ? "scales by importance" : "scales",
               [&](const std::string& isa) { return search_all(quantize::find_searches(isa), given); });
  }
}

}  // namespace fewbits::checks
