// Codes of vectors: scales, nearest points and error feedback, for codebooks as large as those of each type.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels.h"
#include "search/vectors_book.h"
#include "searching.h"

namespace fewbits::checks {
namespace {

using vectors::Signs;

struct Type {
  const char* format;
  size_t dimension, width, points;
  std::vector<float> levels;
  Signs signs;
  float shift, group_shift;
  size_t group, largest, trials;
};

const std::vector<float> kAround{-1, 0, 1}, kThree{1, 3.125f, 5.375f}, kOdd{1, 3, 5, 7, 9, 11, 13, 15},
    kEight{1, 3, 5, 7, 9, 11, 13, 15.5f};

const Type kTypes[] = {
    {"iq1_s", 8, 8, 2048, kAround, Signs::kInPoints, 0, 0.125f, 32, 15, 7},
    {"iq1_m", 8, 8, 2048, kAround, Signs::kInPoints, 0.125f, 0, 16, 15, 7},
    {"iq2_xxs", 8, 8, 256, kThree, Signs::kEven, 0, 0, 32, 31, 5},
    {"iq2_xs", 8, 8, 512, kThree, Signs::kEven, 0, 0, 16, 31, 5},
    {"iq2_s", 8, 8, 1024, kThree, Signs::kFree, 0, 0, 16, 31, 5},
    {"iq3_xxs", 8, 4, 256, kEight, Signs::kEven, 0, 0, 32, 31, 7},
    {"iq3_s", 4, 4, 512, kOdd, Signs::kFree, 0, 0, 32, 31, 7},
};

// The numbers of different points: digits are levels, the first weight's the lowest.
std::vector<size_t> draw_points(const Type& type, Random& random) {
  size_t all = 1;
  for (size_t j = 0; j < type.width; ++j) all *= type.levels.size();
  std::vector<size_t> numbers(all);
  std::iota(numbers.begin(), numbers.end(), size_t{0});
  for (size_t i = 0; i < type.points; ++i) std::swap(numbers[i], numbers[i + random.below(all - i)]);
  numbers.resize(type.points);
  return numbers;
}

// Points at random: Python, which has the real ones, is not here.
vectors::OwnedBook draw_book(const Type& type) {
  Random random(type.points + type.group);
  const size_t halves = type.width == 8 ? 81 : 64;
  std::vector<float> grid, shifts;
  std::vector<size_t> first, second;
  for (size_t number : draw_points(type, random)) {
    first.push_back(number % halves);
    second.push_back(number / halves);
    for (size_t j = 0; j < type.width; ++j, number /= type.levels.size())
      grid.push_back(type.levels[number % type.levels.size()]);
  }
  if (type.shift != 0) shifts = {type.shift, -type.shift};
  const int signs = static_cast<int>(type.signs);
  return {type.dimension, signs, shifts, type.levels, first, second, {grid.data(), type.points, type.width}};
}

float spread_of(const std::vector<float>& grid) {
  float squares = 0;
  for (const float value : grid) squares += value * value;
  return std::sqrt(squares / static_cast<float>(grid.size()));
}

constexpr size_t kRows = kSearchedRows, kCols = kSearchedCols, kTileColumns = 64;

struct Case {
  const vectors::Searches& searches;
  const Type& type;
  const vectors::OwnedBook& owned;
  const Guarded<float>& x;
  const Guarded<float>& importance;
};

struct Scales {  // of each group of each row
  Guarded<float> scale, offset;
};

Scales fit(const Case& of, Results& results) {
  const Type& type = of.type;
  const size_t groups = kCols / type.group, blocks = kCols / vectors::kBlock;
  const bool by_levels = type.signs == Signs::kInPoints, shifted = type.group_shift != 0;
  Guarded<int8_t> sub(kRows * groups), shift(kRows * groups);
  Guarded<uint16_t> d(kRows * blocks);
  const vectors::Fit fit{type.group, type.largest,           type.trials,     by_levels, spread_of(of.owned.grid), 0.6f,
                         1.3f,       1 / type.levels.back(), type.group_shift};
  of.searches.fit(of.owned.book, fit,
                  {of.x.data(), of.importance.data(), kCols, sub.data(), shifted ? shift.data() : nullptr, d.data()}, 0, kRows);
  keep(results, "integers under d", sub);
  keep(results, "shifts", shift);
  keep(results, "scales d", d);
  Scales found{Guarded<float>(kRows * groups), Guarded<float>(kRows * groups)};
  for (size_t i = 0; i < kRows * groups; ++i) {
    found.scale[i] = float_of(d[i * blocks / groups]) * static_cast<float>(sub[i]);
    found.offset[i] = found.scale[i] * static_cast<float>(shift[i]) * type.group_shift;
  }
  return found;
}

void find_nearest(const Case& of, const Scales& scales, Results& results) {
  Guarded<int32_t> codes(kRows * kCols / of.type.dimension);
  const float* const offset = of.type.group_shift == 0 ? nullptr : scales.offset.data();
  vectors::NearestRows rows{of.x.data(), of.importance.data(), kCols, of.type.group, scales.scale.data(), offset, codes.data()};
  of.searches.nearest(of.owned.book, rows, 0, kRows);
  keep(results, "codes", codes);
  rows.group = kCols;
  rows.scale = rows.offset = nullptr;
  of.searches.nearest(of.owned.book, rows, 0, kRows);
  keep(results, "codes without a scale", codes);
}

// Symmetric in each vector, and its diagonal outweighs the rest.
Guarded<float> draw_metric(size_t d, Random& random) {
  Guarded<float> metric(kTileColumns * d);
  for (size_t c = 0; c < kTileColumns; c += d)
    for (size_t j = 0; j < d; ++j)
      for (size_t i = 0; i <= j; ++i) {
        const float cost = i == j ? 1.5f + random.symmetric() : 0.06f * random.symmetric();
        metric[(c + j) * d + i] = metric[(c + i) * d + j] = cost;
      }
  return metric;
}

// Two visits to the first columns: the second keeps codes that cost no more.
void visit_twice(const Case& of, const Scales& scales, Random random, Results& results) {
  constexpr size_t kSize = kTileColumns * kRows;
  const size_t d = of.type.dimension, groups = kCols / of.type.group;
  Guarded<float> weights(kSize), targets(kSize), scale(kSize), offset(kSize), errors(kSize),
      coupling(kTileColumns * kTileColumns);
  Guarded<int32_t> codes(kSize / d);
  for (size_t i = 0; i < kSize; ++i) {
    const size_t column = i / kRows, row = i % kRows, group = row * groups + column / of.type.group;
    weights[i] = targets[i] = std::clamp(of.x[row * kCols + column], -1e20f, 1e20f);  // so that errors never sum up to infinity
    scale[i] = scales.scale[group];
    offset[i] = scales.offset[group];
  }
  for (size_t i = 0; i < coupling.size(); ++i) coupling[i] = 0.1f * random.symmetric();
  const Guarded<float> metric = draw_metric(d, random);
  vectors::Tile tile{kTileColumns,
                     kRows,
                     targets.data(),
                     weights.data(),
                     errors.data(),
                     codes.data(),
                     scale.data(),
                     of.type.group_shift == 0 ? nullptr : offset.data(),
                     coupling.data(),
                     kTileColumns,
                     metric.data(),
                     false,
                     1};
  of.searches.visit(of.owned.book, tile, 0, kRows);
  keep(results, "codes of a visit", codes);
  keep(results, "errors of a visit", errors);
  for (size_t i = 0; i < kSize; ++i) targets[i] += 0.5f * scale[i] * random.symmetric();
  tile.keep = true;
  tile.attempts = 2;
  of.searches.visit(of.owned.book, tile, 0, kRows);
  keep(results, "codes of another visit", codes);
  keep(results, "errors of another visit", errors);
}

}  // namespace

void check_vectors(Digest& digest) {
  for (const Type& type : kTypes) {
    const vectors::OwnedBook owned = draw_book(type);
    for (const bool weighted : {false, true}) {
      Random random(type.points + type.dimension + (weighted ? 1 : 0));
      const Guarded<float> x = draw_rows(random), importance = draw_importance(weighted, random);
      check_same(digest, type.format, [&](const std::string& isa) {
        const Case of{vectors::find_searches(isa), type, owned, x, importance};
        Results results;
        const Scales scales = fit(of, results);
        find_nearest(of, scales, results);
        visit_twice(of, scales, random, results);
        return results;
      });
    }
  }
}

}  // namespace fewbits::checks
