// What the checks of searches share: weights of every size, and the comparison of what each instruction set finds in them.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "checks.h"

namespace fewbits::checks {

constexpr size_t kSearchedRows = 37, kSearchedCols = 512;  // two registers of the widest lanes and a few rows

// (rows, columns): what float16 scales can say, and what they cannot; zeros, ties, and a weight alone.
Guarded<float> draw_rows(Random& random);

// Of each column: all alike, or over nine decades and some of them hardly used.
Guarded<float> draw_importance(bool weighted, Random& random);

// What a search found, by name.
using Results = std::vector<std::pair<std::string, std::vector<uint8_t>>>;

template <typename Number>
void keep(Results& results, const char* what, const Guarded<Number>& found) {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(found.data());
  results.emplace_back(what, std::vector<uint8_t>(bytes, bytes + found.size() * sizeof(Number)));
}

// `search` must find the same with every instruction set that runs here, and on every processor.
void check_same(Digest& digest, const char* what, const std::function<Results(const std::string& isa)>& search);

void check_vectors(Digest& digest);
void check_scales(Digest& digest);
void check_feedback(Digest& digest);

}  // namespace fewbits::checks
