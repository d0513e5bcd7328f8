// Least costs of many overlapping sets at once: what sets share is computed once.
//
// The sets are the second halves that the points of a codebook allow after each first half (search/vectors.h). Costs lie in
// places, those of the halves first. A shared pair writes the less of two places to a new one; each set is then the least of its
// places. iq1's 81 sets of 2048 halves take 661 steps so, iq2_s's 1024 take 192.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fewbits::vectors {

constexpr size_t kMostShared = 256, kMostMembers = 16;
// A place is told in these: one multiplication by 1, 2, 4 or 8 then finds it, which an address has.
constexpr size_t kPlaceBytes = 16;

// Sets are in the order of their sizes, so that the loop over a set is unrolled for each size: half the time of loops that vary.
struct Minima {
  std::vector<uint16_t> pairs;      // two places for each new one
  size_t sets[kMostMembers + 1]{};  // how many have this many members
  std::vector<uint16_t> members;    // places of each set, one set after the other
  std::vector<uint16_t> order;      // which set each is, in kPlaceBytes too
};

// Sets of places 0 to `count` - 1, in order; an empty one is left out.
Minima shared_minima(std::vector<std::vector<uint16_t>> sets, size_t count);

}  // namespace fewbits::vectors
