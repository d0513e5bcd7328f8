// Products of matrices whose sums have one order on every processor, for error feedback (methods/error_feedback/product.py).
//
// A sum is cut into parts of 192 terms, or into halves where it has up to twice that, as MKL cuts it. Each part is added up term
// by term with fused multiply-adds, beginning with zero, and the parts are added one after the other. So a part of the right
// matrix stays in the cache, and no sum depends on how rows and lanes are shared among registers and threads.
//
// Layout: neighbouring lanes are rows of a weight. A tile of 8 x 32 sums stays in registers (AVX2: 4 x 16).
#pragma once

#include <cstddef>
#include <string>

namespace fewbits {

constexpr size_t kProductTerms = 192, kProductLanes = 16;  // lanes come in multiples of this

struct Coupling {
  const float* at;
  size_t stride, rows, columns;
};

// Terms of a part of a sum.
inline size_t product_part(size_t terms) {
  return terms > kProductTerms && terms <= 2 * kProductTerms ? terms / 2 : kProductTerms;
}

// into (coupling.rows, lanes) = base + coupling times right (coupling.columns, lanes); the three have the same stride. `base` may
// be `into`, or null: zeros.
using Multiply = void (*)(const Coupling& coupling, const float* right, size_t stride, size_t lanes, const float* base,
                          float* into);

extern const Multiply scalar_multiply;
#if defined(__x86_64__)
extern const Multiply avx2_multiply, avx512_multiply;
#endif

Multiply find_multiply(const std::string& isa);  // throws std::invalid_argument if it does not run here

}  // namespace fewbits
