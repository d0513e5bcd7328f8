// Packed weights of any format, and what they are as the scalar reader has it: w = scale * (byte - zero) + offset.
#pragma once

#include "checks.h"
#include "kernels.h"
#include "matmul/matmul.h"

namespace fewbits::checks {

struct Weight {
  const Layout* layout;
  size_t rows, cols;
  std::vector<Guarded<uint8_t>> parts;

  Weight(const Layout& layout, size_t rows, size_t cols);
  std::array<const uint8_t*, kMaxFields> row(size_t i) const { return packed().at(i); }
  PackedWeight packed() const;
};

// Codebooks get points at random: Python, which has the real ones, is not here.
void give_grids();

// Any bytes at all, so that values may be NaN.
Weight any_bytes(const Layout& layout, size_t rows, size_t cols, uint64_t seed);

// Any bytes but for blocks with a value beyond 2^40: those are drawn anew.
Weight any_numbers(const Layout& layout, size_t rows, size_t cols, uint64_t seed);

// Scales of a usual size, and codes by `code_of(column)`; the format must have a packer.
Weight packed_codes(const Layout& layout, size_t rows, size_t cols, uint64_t seed, const std::vector<uint8_t>& codes);
size_t count_codes(const Kernel& scalar);

// `past` the caches, into memory that is aligned for it; or into memory that ends where it must not be left.
std::vector<float> decode(const Kernel& kernel, const Weight& weight, bool past);

struct Values {  // (rows, cols) each
  std::vector<int> byte;
  std::vector<double> w, size;  // size: |scale| * (byte + zero) + |offset|, which bounds what is added up on the way to a product
  std::vector<float> rounded;   // w, each operation rounded to float32
};

Values values_of(const Kernel& scalar, const Weight& weight);

// Widths that a format can have: one block, a few, and several panels; a part of a block where it may end in one.
std::vector<size_t> widths_of(const Layout& layout);

}  // namespace fewbits::checks
