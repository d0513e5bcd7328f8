// How threads share the rows of a packed weight.
#pragma once

#include <algorithm>
#include <atomic>

#include "matmul/matmul.h"
#include "platform/threads.h"

namespace fewbits {

constexpr size_t kWorthAThread = 1 << 15;  // products; a thread of the pool begins within a microsecond or two
constexpr size_t kBytesAtATime = 1 << 20;  // of weights, per visit of a thread: short, because a thread may be slower than others

// Work is split into visits; a free thread takes the next one. Results do not depend on which thread does it.
template <typename Visit>
void for_visits(size_t visits, size_t products, int threads, const Visit& visit) {
  const size_t shares = shares_of(threads, std::min(visits, std::max<size_t>(1, products / kWorthAThread)));
  std::atomic<size_t> next = 0;
  run_shares(shares, [&](size_t) {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < visits;) visit(i);
  });
}

// Rows of each of four streams in one visit: as many as possible without leaving a thread idle at the end.
inline size_t rows_at_a_time(size_t rows, size_t row_bytes, int threads) {
  const size_t equal = static_cast<size_t>(std::max(1, threads)), turns = 1 + rows * row_bytes / (equal * kBytesAtATime);
  return std::max<size_t>(1, (rows + 4 * equal * turns - 1) / (4 * equal * turns));
}

// One row of activations: one(rows, sums) and four(rows, sums) compute the products with one or four rows of weights. Reading
// memory in four places at once is faster than in one.
template <typename One, typename Four>
void stream_fours(const Product& product, int threads, const One& one, const Four& four) {
  size_t row_bytes = 0;
  for (const size_t stride : product.weight.stride) row_bytes += stride;
  const size_t at_a_time = 4 * rows_at_a_time(product.weights, row_bytes, threads);
  const size_t visits = (product.weights + at_a_time - 1) / at_a_time;
  for_visits(visits, product.weights * product.cols, threads, [&](size_t visit) {
    const size_t first = visit * at_a_time, count = std::min(at_a_time, product.weights - first), apart = count / 4;
    std::array<const uint8_t*, kMaxFields> parts[4];
    const RowOf rows[4] = {parts[0].data(), parts[1].data(), parts[2].data(), parts[3].data()};
    float sums[4];
    const auto keep = [&](size_t w, float sum) { product.out[w] = product.bias ? sum + product.bias[w] : sum; };
    for (size_t i = 0; i < apart; ++i) {
      for (size_t k = 0; k < 4; ++k) parts[k] = product.weight.at(first + k * apart + i);
      four(rows, sums);
      for (size_t k = 0; k < 4; ++k) keep(first + k * apart + i, sums[k]);
    }
    for (size_t w = first + 4 * apart; w < first + count; ++w) {
      parts[0] = product.weight.at(w);
      one(rows, sums);
      keep(w, sums[0]);
    }
  });
}

}  // namespace fewbits
