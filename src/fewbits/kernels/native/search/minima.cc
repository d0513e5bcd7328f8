#include "search/minima.h"

#include <algorithm>
#include <numeric>

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

}  // namespace

Minima shared_minima(Sets sets, size_t count) {
  constexpr int kWorthSharing = 2;  // sets; with fewer a pair only adds a store
  Minima made;
  PairCounts held(count + kMostShared);
  for (const auto& set : sets) held.add(set, 1);
  for (size_t next = count; next < count + kMostShared; ++next) {
    const auto most = std::max_element(held.counts.begin(), held.counts.end());
    if (*most < kWorthSharing) break;
    const size_t at = static_cast<size_t>(most - held.counts.begin());
    const auto low = static_cast<uint16_t>(at / held.places), high = static_cast<uint16_t>(at % held.places);
    for (auto& set : sets) {  // each is in order
      if (!std::binary_search(set.begin(), set.end(), low) || !std::binary_search(set.begin(), set.end(), high)) continue;
      held.add(set, -1);
      std::erase_if(set, [&](uint16_t place) { return place == low || place == high; });
      set.push_back(static_cast<uint16_t>(next));
      held.add(set, 1);
    }
    made.pairs.insert(made.pairs.end(), {low, high});
  }
  made.order.resize(sets.size());
  std::iota(made.order.begin(), made.order.end(), uint16_t{0});
  std::erase_if(made.order, [&](uint16_t i) { return sets[i].empty(); });
  std::stable_sort(made.order.begin(), made.order.end(), [&](size_t a, size_t b) { return sets[a].size() < sets[b].size(); });
  for (const uint16_t i : made.order) {
    made.sizes.push_back(static_cast<uint16_t>(sets[i].size()));
    made.members.insert(made.members.end(), sets[i].begin(), sets[i].end());
  }
  return made;
}

}  // namespace fewbits::vectors
