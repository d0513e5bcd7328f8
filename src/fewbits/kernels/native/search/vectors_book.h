// A codebook (search/vectors.h) and the memory that it points to, made from its points and the halves that they consist of.
#pragma once

#include <vector>

#include "search/minima.h"
#include "search/vectors.h"

namespace fewbits::vectors {

// One after another, in the order of their numbers.
struct Points {
  const float* at;
  size_t count, width;
};

struct OwnedBook {
  std::vector<int16_t> numbers;
  std::vector<uint8_t> begun;
  std::vector<float> grid;
  Minima minima;
  Book book{};

  // `first` and `second` are the halves of each point. Throws std::invalid_argument if these do not belong together.
  OwnedBook(size_t dimension, int signs, const std::vector<float>& shifts, const std::vector<float>& levels,
            const std::vector<size_t>& first, const std::vector<size_t>& second, const Points& points);
  OwnedBook(const OwnedBook&) = delete;
  OwnedBook& operator=(const OwnedBook&) = delete;

 private:
  void pair_halves(const std::vector<size_t>& first, const std::vector<size_t>& second);
};

// The search of `VectorSearch` of formats/search/vectors.py. Throws std::invalid_argument if there is no such search.
Fit fit_of(const Book& book, const std::vector<size_t>& sizes, const std::vector<float>& numbers);

}  // namespace fewbits::vectors
