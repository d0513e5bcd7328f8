// Products that do not round activations: weights are decoded to float32 a row at a time, and multiplied while they are in the
// first-level cache. This is for few rows of activations; for many, a library's float product of decoded weights is faster.
#pragma once

#include "matmul/matmul.h"

namespace fewbits {

void multiply_exactly(const Product& product, int threads);  // product.tiles is not read

}  // namespace fewbits
