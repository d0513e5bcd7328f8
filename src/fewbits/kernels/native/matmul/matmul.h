// x (rows, cols), which is rounded to int8, times a packed weight (weights, cols) transposed -> out (rows, weights).
#pragma once

#include <vector>

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

// A product whose sizes have been checked. `bias` may be null.
struct Product {
  const Kernel& kernel;
  PackedWeight weight;
  const uint8_t* tiles;  // the weight in the layout of tiles.h; null: as it is stored
  size_t rows, cols, weights;
  const float* x;
  const float* bias;
  float* out;
};

void multiply(const Product& product, int threads);

// One row of activations in int8, for all weights that multiply it. The arrays are kept between calls.
class QuantizedRow {
 public:
  void fill(const char* isa, const float* x, size_t cols);
  ActivationRow with_zero(int zero);  // the zero of a format's bytes; valid until the next call

 private:
  std::vector<int8_t> q_;
  std::vector<float> scale_, sum_32_, sum_16_;
  std::vector<int32_t> sums_, zeros_, zeros_16_;
};

void multiply_row(const Product& product, QuantizedRow& x, int threads);  // product.x is not read

}  // namespace fewbits
