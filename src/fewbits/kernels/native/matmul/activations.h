// Activations as int8, the left operand of integer products with packed weights.
//
// Each row is cut into blocks of 32 columns. A block with the largest magnitude m has scale d = m / 127 (float32) and codes
// q = x / d, rounded to the nearest integer, halves to even, in -127..127. Zeros, and values so small that d is zero, have scale
// 0 and codes 0. A block with a NaN or an infinity has scale NaN and codes 0, so that every result computed from it is NaN.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fewbits {

constexpr size_t kActivationBlock = 32;  // columns under one scale
constexpr size_t kActivationSum = 16;    // columns under one sum

constexpr size_t padded_columns(size_t cols) { return (cols + kActivationBlock - 1) / kActivationBlock * kActivationBlock; }

// Where codes are written: memory of the caller, of any alignment.
struct QuantizedRows {
  size_t rows, cols;
  size_t padded;  // padded_columns(cols): codes beyond `cols` are 0
  int8_t* q;      // (rows, padded)
  float* scale;   // (rows, padded / 32)
  int32_t* sums;  // (rows, padded / 16): sums of the codes of 16 columns each, which formats with offsets need
};

// Quantizes `rows` x `cols` contiguous float32; sets rows, cols and padded of `into` too. Every ISA and any number of threads
// give the same bytes. "avx512..." and "avx..." choose those instruction sets, every other name the scalar code; throws
// std::invalid_argument if this processor does not have the instructions.
void quantize_rows(const char* isa, const float* x, size_t rows, size_t cols, QuantizedRows& into, int threads);

// The same for one row, for callers that already use the threads.
using QuantizeRow = void (*)(const float* x, size_t cols, int8_t* q, float* scale, int32_t* sums);
QuantizeRow find_quantize_row(const char* isa);

}  // namespace fewbits
