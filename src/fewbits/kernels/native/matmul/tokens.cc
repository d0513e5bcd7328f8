// Rounds activations to int8 with one scale for each row, for w8a8.h.
#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "matmul/w8a8.h"
#include "platform/avx512.h"
#include "platform/threads.h"

namespace fewbits {
namespace {

// Always inlined, so that each instruction set compiles its own version.
#define FEWBITS_LINES inline __attribute__((always_inline))

// Read as integers, magnitudes of floats keep their order, and NaN is above all of them.
FEWBITS_LINES float quantize_row(const float* x, size_t cols, int8_t* codes) {
  int32_t peak_bits = 0;
  for (size_t j = 0; j < cols; ++j) {
    const int32_t size = std::bit_cast<int32_t>(x[j]) & 0x7fffffff;
    peak_bits = size > peak_bits ? size : peak_bits;
  }
  const float peak = std::bit_cast<float>(peak_bits), scale = peak / 127.0f;
  if (peak_bits >= 0x7f800000 || scale == 0.0f) {
    std::memset(codes, 0, cols);
    return peak_bits >= 0x7f800000 ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
  }
  constexpr float kRounder = 0x1.8p23f;  // adding and subtracting it rounds to even
  for (size_t j = 0; j < cols; ++j) {
    const float level = (x[j] / scale + kRounder) - kRounder, low = level < -127.0f ? -127.0f : level;
    codes[j] = static_cast<int8_t>(static_cast<int32_t>(low > 127.0f ? 127.0f : low));
  }
  return scale;
}

using Quantize = float (*)(const float* x, size_t cols, int8_t* codes);  // -> scale

float quantize_scalar(const float* x, size_t cols, int8_t* codes) { return quantize_row(x, cols, codes); }
#if defined(__x86_64__)
FEWBITS_AVX2 float quantize_avx2(const float* x, size_t cols, int8_t* codes) { return quantize_row(x, cols, codes); }
FEWBITS_AVX512 float quantize_avx512(const float* x, size_t cols, int8_t* codes) { return quantize_row(x, cols, codes); }
#endif

Quantize find(const char* isa) {
#if defined(__x86_64__)
  if (!std::strcmp(isa, "avx512") && has_avx512()) return quantize_avx512;
  if ((!std::strcmp(isa, "avx2") || !std::strcmp(isa, "avxvnni")) && has_avx2()) return quantize_avx2;
#elif defined(__aarch64__)
  if (!std::strcmp(isa, "neon")) return quantize_scalar;  // the compiler vectorises the scalar code with NEON
#endif
  if (!std::strcmp(isa, "scalar")) return quantize_scalar;
  throw std::invalid_argument(std::string("no ") + isa + " kernel rounds to int8 here");
}

}  // namespace

void quantize_tokens(const char* isa, const float* x, size_t rows, size_t cols, int8_t* codes, float* scale, int threads) {
  const Quantize quantize = find(isa);
  constexpr size_t kWorthAThread = 1 << 14;  // values
  const size_t shares = shares_of(threads, std::min(rows, std::max<size_t>(1, rows * cols / kWorthAThread)));
  run_shares(shares, [&](size_t i) {
    for (size_t row = rows * i / shares; row < rows * (i + 1) / shares; ++row)
      scale[row] = quantize(x + row * cols, cols, codes + row * cols);
  });
}

}  // namespace fewbits
