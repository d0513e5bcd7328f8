// int8 times int8: sums of 32 bits, exact for all inputs; then a scale for each row of x, a scale for each row of weights and a
// bias.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fewbits {

struct IntegerProduct {
  size_t rows, cols, weights;
  const int8_t* x;       // (rows, cols)
  const float* x_scale;  // (rows)
  const int8_t* w;       // (weights, cols)
  const float* w_scale;  // (weights)
  const float* bias;     // (weights), may be null
  float* out;            // (rows, weights)
};

constexpr size_t kMostIntegerColumns = 65536;  // 255 * 128 * this is just below 2^31

void multiply_integers(const char* isa, const IntegerProduct& product, int threads);

// x (rows, cols) float32 -> codes, and a scale for each row, whose largest value gets code 127; rounded to nearest even. A row
// with a NaN or an infinity has scale NaN and codes 0.
void quantize_tokens(const char* isa, const float* x, size_t rows, size_t cols, int8_t* codes, float* scale, int threads);

}  // namespace fewbits
