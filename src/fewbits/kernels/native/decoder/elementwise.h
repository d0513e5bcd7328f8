// The rest of a decode step beside products: short loops over a row, written so that compilers vectorise them.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "attention/attention.h"

namespace fewbits {

// e**x by the series of attention/attention.h, for x up to 88; below -87 it is 0, and NaN stays NaN.
inline float exponential(float x) {
  const float clipped = std::min(std::max(x, kLeast), 88.0f);
  const float scaled = clipped * kLog2E;
  const int32_t n = static_cast<int32_t>(scaled + (scaled < 0 ? -0.5f : 0.5f));
  const float count = static_cast<float>(n), r = (clipped - count * kLn2High) - count * kLn2Low;
  float series = kSeries[0];
  for (size_t i = 1; i < std::size(kSeries); ++i) series = series * r + kSeries[i];
  const float value = series * std::bit_cast<float>((n + 127) << 23);
  return x < kLeast ? 0.0f : x != x ? x : value;
}

// x / sqrt(mean(x^2) + eps) * weight; in sixteen sums, so that additions do not wait for each other
inline void rms_norm(const float* x, const float* weight, size_t n, float eps, float* out) {
  double lanes[16] = {};
  size_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (size_t k = 0; k < 16; ++k) lanes[k] += static_cast<double>(x[i + k]) * x[i + k];
  for (; i < n; ++i) lanes[0] += static_cast<double>(x[i]) * x[i];
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  const float r = static_cast<float>(1 / std::sqrt(sum / static_cast<double>(n) + eps));
  for (i = 0; i < n; ++i) out[i] = x[i] * r * weight[i];
}

// gate * sigmoid(gate) * up
inline void silu_and_multiply(const float* gate, const float* up, size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = gate[i] / (1 + exponential(-gate[i])) * up[i];
}

// Rotates pairs (i, i + width / 2) of each head by the position's angles.
inline void rotate(float* x, size_t heads, size_t width, const float* cosine, const float* sine) {
  const size_t half = width / 2;
  for (size_t head = 0; head < heads; ++head, x += width)
    for (size_t i = 0; i < half; ++i) {
      const float a = x[i], b = x[i + half];
      x[i] = a * cosine[i] - b * sine[i];
      x[i + half] = b * cosine[i] + a * sine[i];
    }
}

}  // namespace fewbits
