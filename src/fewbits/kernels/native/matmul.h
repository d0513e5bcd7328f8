// x (rows, cols) times a packed weight (weights, cols) transposed -> out (rows, weights), activations rounded to int8 on the way.
#pragma once

#include "kernels.h"

namespace fewbits {

// The rows of a packed weight: where each array begins, and how far apart its rows are.
struct PackedWeight {
  std::array<const uint8_t*, kMaxFields> start{};
  std::array<size_t, kMaxFields> stride{};

  std::array<const uint8_t*, kMaxFields> at(size_t row) const {
    std::array<const uint8_t*, kMaxFields> here{};
    for (size_t i = 0; i < kMaxFields; ++i) here[i] = start[i] + row * stride[i];
    return here;
  }
};

// What is true of x, the weight and out: their sizes were checked. `bias` may be null.
struct Product {
  const Kernel& kernel;
  PackedWeight weight;
  const uint8_t* tiles;  // the weight as tiles.h lays it out; null: as it is stored
  size_t rows, cols, weights;
  const float* x;
  const float* bias;
  float* out;
};

void multiply(const Product& product, int threads);

}  // namespace fewbits
