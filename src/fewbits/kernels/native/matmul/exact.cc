#include "matmul/exact.h"

#include <vector>

#include "matmul/dense.h"
#include "matmul/visits.h"

namespace fewbits {
namespace {

// Decodes a row of weights once for all rows of activations.
void decode_and_multiply(const Product& product, int threads) {
  const DotDense dot = find_dot_dense(Dense::kFloat32, product.kernel.isa);
  constexpr size_t kAtATime = 16;
  const size_t visits = (product.weights + kAtATime - 1) / kAtATime;
  for_visits(visits, product.rows * product.weights * product.cols, threads, [&](size_t visit) {
    thread_local std::vector<float> decoded;
    decoded.resize(product.cols);
    const uint8_t* const as_bytes = reinterpret_cast<const uint8_t*>(decoded.data());
    for (size_t w = visit * kAtATime; w < std::min((visit + 1) * kAtATime, product.weights); ++w) {
      product.kernel.of.decode_row(product.kernel.layout, product.weight.at(w).data(), product.cols, decoded.data(), false);
      for (size_t row = 0; row < product.rows; ++row) {
        const float sum = dot(as_bytes, product.x + row * product.cols, product.cols);
        product.out[row * product.weights + w] = product.bias ? sum + product.bias[w] : sum;
      }
    }
  });
}

}  // namespace

void multiply_exactly(const Product& product, int threads) {
  const Functions& of = product.kernel.of;
  if (product.rows != 1 || !of.dot_floats) return decode_and_multiply(product, threads);
  const auto some = [&](const RowOf* rows, size_t count, float* sums) {
    of.dot_floats(product.kernel.layout, rows, count, product.x, product.cols, sums);
  };
  stream_fours(
      product, threads, [&](const RowOf* row, float* sum) { some(row, 1, sum); },
      [&](const RowOf* rows, float* sums) { some(rows, 4, sums); });
}

}  // namespace fewbits
