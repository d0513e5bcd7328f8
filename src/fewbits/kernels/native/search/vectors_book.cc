#include "search/vectors_book.h"

#include <algorithm>
#include <cmath>

#include "search/quantize.h"

namespace fewbits::vectors {

using quantize::needs;

namespace {

constexpr float kFaintest = 0x1p-13f;  // no cost of a large value passes 2^31, beyond which there are no integers

}  // namespace

OwnedBook::OwnedBook(size_t dimension, int signs, const std::vector<float>& shifts, const std::vector<float>& levels,
                     const std::vector<size_t>& first, const std::vector<size_t>& second, const Points& points)
    : grid(points.at, points.at + points.count * points.width) {
  const size_t width = points.width, count = points.count, halves = width == 8 ? 81 : 64;
  const auto is_half = [&](size_t i) { return i < halves; };
  needs((dimension == 4 || dimension == 8) && (width == 4 || width == 8) && dimension % width == 0,
        "vectors have 4 or 8 weights");
  needs(levels.size() == (width == 8 ? 3 : 8), "a half is four of three levels or two of eight");
  needs(count >= 2 && count <= 4096 && first.size() == count && second.size() == count, "each point has two halves");
  needs(std::all_of(first.begin(), first.end(), is_half) && std::all_of(second.begin(), second.end(), is_half),
        "a half is one of them");
  needs(signs >= 0 && signs <= 2 && (shifts.empty() || (shifts.size() == 2 && signs == 0 && width == dimension)),
        "there are two shifts of a whole point or none");
  book.dimension = dimension;
  book.width = width;
  book.signs = static_cast<Signs>(signs);
  book.shift_count = shifts.size();
  while (size_t{1} << book.index_bits < count) ++book.index_bits;
  book.level_count = levels.size();
  book.half_count = halves;
  book.grid = grid.data();
  std::copy(shifts.begin(), shifts.end(), book.shifts);
  std::copy(levels.begin(), levels.end(), book.levels);
  float least = INFINITY;
  for (const float level : levels)
    for (const float shift : shifts.empty() ? std::vector<float>{0.0f} : shifts)
      least = std::min(least, (level + shift) * (level + shift));
  book.faintest = std::max(kFaintest, least);
  pair_halves(first, second);
}

void OwnedBook::pair_halves(const std::vector<size_t>& first, const std::vector<size_t>& second) {
  const size_t halves = book.half_count;
  numbers.assign(halves * halves, -1);
  for (size_t i = 0; i < first.size(); ++i) {
    int16_t& number = numbers[first[i] * halves + second[i]];
    needs(number < 0, "no point is there twice");
    number = static_cast<int16_t>(i);
  }
  std::vector<std::vector<uint16_t>> sets(halves);
  for (size_t a = 0; a < halves; ++a)
    for (size_t b = 0; b < halves; ++b)
      if (numbers[a * halves + b] >= 0) sets[a].push_back(static_cast<uint16_t>(b));
  for (const auto& set : sets) begun.push_back(!set.empty());
  minima = shared_minima(std::move(sets), halves);
  book.numbers = numbers.data();
  book.begun = begun.data();
  book.pair_count = minima.pairs.size() / 2;
  book.sets = minima.sets;
  book.pairs = minima.pairs.data();
  book.order = minima.order.data();
  book.members = minima.members.data();
}

Fit fit_of(const Book& book, const std::vector<size_t>& sizes, const std::vector<float>& numbers) {
  needs(sizes.size() == 4 && numbers.size() == 5, "a search has four sizes and five numbers");
  const Fit given{sizes[0], sizes[1], sizes[2], sizes[3] != 0, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]};
  needs((given.group == 16 || given.group == 32) && given.trials >= 3 && given.trials <= kMostTrials && given.largest >= 1 &&
            given.largest <= 127,
        "a group has 16 or 32 weights");
  needs(!given.by_levels || book.level_count == 3, "each weight alone is asked about three levels");
  return given;
}

}  // namespace fewbits::vectors
