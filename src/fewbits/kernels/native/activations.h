// Activations as int8: what a matmul on integers multiplies packed weights by.
//
// Each row is cut into blocks of 32 columns. A block with the largest magnitude m has scale d = m / 127 (float32) and codes
// q = x / d, rounded to the nearest integer, halves to even, in -127..127. Zeros, and values so small that d is zero, have scale
// 0 and codes 0. A block with a NaN or an infinity has scale NaN and codes 0, so that whatever is computed from it is NaN and not
// a number that hides it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fewbits {

constexpr size_t kActivationBlock = 32;  // columns under one scale
constexpr size_t kActivationSum = 16;    // columns under one sum

constexpr size_t padded_columns(size_t cols) { return (cols + kActivationBlock - 1) / kActivationBlock * kActivationBlock; }

// Where codes go: memory of the caller, which nothing here frees. Nothing needs to be aligned.
struct QuantizedRows {
  size_t rows, cols;
  size_t padded;  // padded_columns(cols): codes beyond `cols` are 0
  int8_t* q;      // (rows, padded)
  float* scale;   // (rows, padded / 32)
  int32_t* sums;  // (rows, padded / 16): of the codes of 16 columns each, which is what a format with an offset needs
};

// Quantizes `rows` x `cols` float32, one row after the other in memory; writes rows, cols and padded of `into` too. Every ISA and
// any number of threads give the same bytes. "avx512..." and "avx..." name those paths, every other name the scalar one; throws
// std::invalid_argument where this processor has no such instructions.
void quantize_rows(const char* isa, const float* x, size_t rows, size_t cols, QuantizedRows& into, int threads);

// The same for one row, for who has threads of its own.
using QuantizeRow = void (*)(const float* x, size_t cols, int8_t* q, float* scale, int32_t* sums);
QuantizeRow find_quantize_row(const char* isa);

}  // namespace fewbits
