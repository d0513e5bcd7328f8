#include "search/minima.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace fewbits::vectors {
namespace {

using Sets = std::vector<std::vector<uint16_t>>;

// How many sets hold each pair of places, the lower place first.
struct PairCounts {
  explicit PairCounts(size_t places) : places(places), counts(places * places) {}

  void add(const std::vector<uint16_t>& set, int change) {
    for (size_t i = 0; i < set.size(); ++i)
      for (size_t j = i + 1; j < set.size(); ++j) counts[set[i] * places + set[j]] += change;
  }

  size_t places;
  std::vector<int> counts;
};

// The pair that most sets hold, or one of a set that has too many members; neither: two equal places.
std::pair<uint16_t, uint16_t> next_pair(const Sets& sets, const PairCounts& held) {
  const auto most = std::max_element(held.counts.begin(), held.counts.end());
  const auto at = static_cast<size_t>(most - held.counts.begin());
  if (*most > 1) return {static_cast<uint16_t>(at / held.places), static_cast<uint16_t>(at % held.places)};
  for (const auto& set : sets)
    if (set.size() > kMostMembers) return {set[0], set[1]};
  return {};
}

uint16_t told(size_t place) { return static_cast<uint16_t>(place * kPlaceBytes); }

using Pairs = std::vector<std::pair<uint16_t, uint16_t>>;

// By how many others they wait for, so that a processor finds pairs side by side that wait for none: a store takes some cycles
// until it can be loaded. Returns the new places, by the old.
std::vector<uint16_t> by_depth(Pairs& pairs, size_t count) {
  std::vector<size_t> depth(count), order(pairs.size());
  for (const auto& [low, high] : pairs) depth.push_back(1 + std::max(depth[low], depth[high]));
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return depth[count + a] < depth[count + b]; });
  std::vector<uint16_t> moved(count + pairs.size());
  std::iota(moved.begin(), moved.end(), uint16_t{0});
  for (size_t i = 0; i < order.size(); ++i) moved[count + order[i]] = static_cast<uint16_t>(count + i);
  Pairs sorted;
  for (const size_t i : order) sorted.emplace_back(moved[pairs[i].first], moved[pairs[i].second]);
  pairs = std::move(sorted);
  return moved;
}

}  // namespace

Minima shared_minima(Sets sets, size_t count) {
  Pairs pairs;
  PairCounts held(count + kMostShared);
  for (const auto& set : sets) held.add(set, 1);
  for (size_t next = count; next < count + kMostShared; ++next) {
    const auto [low, high] = next_pair(sets, held);
    if (low == high) break;
    for (auto& set : sets) {
      if (!std::binary_search(set.begin(), set.end(), low) || !std::binary_search(set.begin(), set.end(), high)) continue;
      held.add(set, -1);
      std::erase(set, low);
      std::erase(set, high);
      set.push_back(static_cast<uint16_t>(next));
      held.add(set, 1);
    }
    pairs.emplace_back(low, high);
  }
  Minima made;
  const std::vector<uint16_t> moved = by_depth(pairs, count);
  for (const auto& [low, high] : pairs) made.pairs.insert(made.pairs.end(), {told(low), told(high)});
  std::vector<uint16_t> order(sets.size());
  std::iota(order.begin(), order.end(), uint16_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return sets[a].size() < sets[b].size(); });
  for (const uint16_t i : order) {
    if (sets[i].empty()) continue;
    if (sets[i].size() > kMostMembers) throw std::length_error("sets of halves share too little");
    ++made.sets[sets[i].size()];
    made.order.push_back(told(i));
    for (const uint16_t place : sets[i]) made.members.push_back(told(moved[place]));
  }
  return made;
}

}  // namespace fewbits::vectors
