#include "attention/float16.h"

#include <algorithm>
#include <vector>

#include "attention/attention.h"
#include "kernels.h"
#include "platform/avx2.h"
#include "platform/threads.h"

namespace fewbits {
namespace {

constexpr size_t kTogether = 4;  // queries whose sums are in registers at once

// scores[query][token] += q . keys of 16 tokens, for up to kTogether queries
using ScoreTokens = void (*)(const uint16_t* keys, size_t width, const float* q, size_t count, float* scores, size_t stride);
// out[query][channel] += p . values, for 8 channels and up to kTogether queries
using SumValues = void (*)(const uint16_t* values, size_t width, size_t tokens, const float* p, size_t stride, size_t count,
                           float* out);

void score_scalar(const uint16_t* keys, size_t width, const float* q, size_t count, float* scores, size_t stride) {
  for (size_t i = 0; i < count; ++i)
    for (size_t t = 0; t < kKeyTokens; ++t) {
      float sum = 0;
      for (size_t c = 0; c < width; ++c) sum += q[i * width + c] * float_of(keys[c * kKeyTokens + t]);
      scores[i * stride + t] = sum;
    }
}

void sum_scalar(const uint16_t* values, size_t width, size_t tokens, const float* p, size_t stride, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i)
    for (size_t c = 0; c < 8; ++c) {
      float sum = 0;
      for (size_t t = 0; t < tokens; ++t) sum += p[i * stride + t] * float_of(values[t * width + c]);
      out[i * width + c] = sum;
    }
}

#if defined(__x86_64__)
template <size_t kCount>
FEWBITS_AVX2 void score_some(const uint16_t* keys, size_t width, const float* q, float* scores, size_t stride) {
  __m256 sums_f32x8[kCount][2];
  for (auto& sum : sums_f32x8) sum[0] = sum[1] = _mm256_setzero_ps();
  for (size_t c = 0; c < width; ++c) {
    const auto* const at = reinterpret_cast<const uint8_t*>(keys + c * kKeyTokens);
    const __m256 first_f32x8 = _mm256_cvtph_ps(load_16(at)), second_f32x8 = _mm256_cvtph_ps(load_16(at + 16));
#pragma GCC unroll 4
    for (size_t i = 0; i < kCount; ++i) {
      const __m256 q_f32x8 = _mm256_broadcast_ss(q + i * width + c);
      sums_f32x8[i][0] = _mm256_fmadd_ps(q_f32x8, first_f32x8, sums_f32x8[i][0]);
      sums_f32x8[i][1] = _mm256_fmadd_ps(q_f32x8, second_f32x8, sums_f32x8[i][1]);
    }
  }
  for (size_t i = 0; i < kCount; ++i) {
    _mm256_storeu_ps(scores + i * stride, sums_f32x8[i][0]);
    _mm256_storeu_ps(scores + i * stride + 8, sums_f32x8[i][1]);
  }
}

template <size_t kCount>
FEWBITS_AVX2 void sum_some(const uint16_t* values, size_t width, size_t tokens, const float* p, size_t stride, float* out) {
  __m256 sums_f32x8[kCount];
  for (auto& sum : sums_f32x8) sum = _mm256_setzero_ps();
  for (size_t t = 0; t < tokens; ++t) {
    const __m256 v_f32x8 = _mm256_cvtph_ps(load_16(reinterpret_cast<const uint8_t*>(values + t * width)));
#pragma GCC unroll 4
    for (size_t i = 0; i < kCount; ++i)
      sums_f32x8[i] = _mm256_fmadd_ps(_mm256_broadcast_ss(p + i * stride + t), v_f32x8, sums_f32x8[i]);
  }
  for (size_t i = 0; i < kCount; ++i) _mm256_storeu_ps(out + i * width, sums_f32x8[i]);
}

void score_avx2(const uint16_t* keys, size_t width, const float* q, size_t count, float* scores, size_t stride) {
  if (count == 4) return score_some<4>(keys, width, q, scores, stride);
  if (count == 3) return score_some<3>(keys, width, q, scores, stride);
  if (count == 2) return score_some<2>(keys, width, q, scores, stride);
  score_some<1>(keys, width, q, scores, stride);
}

void sum_avx2(const uint16_t* values, size_t width, size_t tokens, const float* p, size_t stride, size_t count, float* out) {
  if (count == 4) return sum_some<4>(values, width, tokens, p, stride, out);
  if (count == 3) return sum_some<3>(values, width, tokens, p, stride, out);
  if (count == 2) return sum_some<2>(values, width, tokens, p, stride, out);
  sum_some<1>(values, width, tokens, p, stride, out);
}

FEWBITS_AVX2 void halves_avx2(const float* from, size_t n, uint16_t* out) {
  for (size_t i = 0; i < n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#endif

// To nearest, halves to even; values too large become infinite.
uint16_t half_of(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x7f800000) return static_cast<uint16_t>(sign | (magnitude > 0x7f800000 ? 0x7e00 : 0x7c00));
  if (magnitude < 0x38800000) {  // subnormal: adding 0.5 leaves the bits that stay, rounded, at the end
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | (rounded >= 0x47800000 ? 0x7c00 : (rounded - 0x38000000) >> 13));
}

void to_halves(const float* from, size_t n, uint16_t* out) {
#if defined(__x86_64__)
  if (n % 8 == 0 && has_avx2()) return halves_avx2(from, n, out);
#endif
  for (size_t i = 0; i < n; ++i) out[i] = half_of(from[i]);
}

}  // namespace

void append_token(const HalfCache& cache, size_t token, const float* keys, const float* values) {
  const size_t width = cache.width;
  std::vector<uint16_t> half(width);
  for (size_t head = 0; head < cache.heads; ++head) {
    to_halves(keys + head * width, width, half.data());
    uint16_t* const into = cache.keys + head * cache.room * width + token / kKeyTokens * kKeyTokens * width + token % kKeyTokens;
    for (size_t c = 0; c < width; ++c) into[c * kKeyTokens] = half[c];
    to_halves(values + head * width, width, cache.values + (head * cache.room + token) * width);
  }
}

void attend_halves(const HalfCache& cache, size_t tokens, const float* q, size_t queries, float factor, float* out, int threads) {
  constexpr size_t kWorthAShare = 1 << 15;  // values: about 5 us
  ScoreTokens score = score_scalar;
  SumValues sum = sum_scalar;
#if defined(__x86_64__)
  if (has_avx2()) score = score_avx2, sum = sum_avx2;
  const AttentionIsa& isa = kAttentionAvx512.runs_here() ? kAttentionAvx512 : has_avx2() ? kAttentionAvx2 : kAttentionScalar;
#else
  const AttentionIsa& isa = kAttentionScalar;
#endif
  const size_t width = cache.width, padded = (tokens + kKeyTokens - 1) / kKeyTokens * kKeyTokens;
  const size_t per_head = (queries + kTogether - 1) / kTogether, tasks = cache.heads * per_head;
  const size_t shares = shares_of(threads, std::min(tasks, cache.heads * queries * tokens * width / kWorthAShare));
  run_shares(shares, [&](size_t share) {
    thread_local std::vector<float> scores, scaled;
    scores.resize(kTogether * padded);
    scaled.resize(kTogether * width);
    for (size_t task = tasks * share / shares; task < tasks * (share + 1) / shares; ++task) {
      const size_t head = task / per_head, first = task % per_head * kTogether, count = std::min(kTogether, queries - first);
      for (size_t i = 0; i < count * width; ++i) scaled[i] = factor * q[(head * queries + first) * width + i];
      const uint16_t* const keys = cache.keys + head * cache.room * width;
      for (size_t t = 0; t < tokens; t += kKeyTokens)
        score(keys + t * width, width, scaled.data(), count, scores.data() + t, padded);
      float total[kTogether];
      for (size_t i = 0; i < count; ++i) {
        float largest;
        total[i] = isa.exponentials(scores.data() + i * padded, tokens, largest);
      }
      float* const into = out + (head * queries + first) * width;
      for (size_t c = 0; c < width; c += 8)
        sum(cache.values + head * cache.room * width + c, width, tokens, scores.data(), padded, count, into + c);
      for (size_t i = 0; i < count; ++i)
        for (size_t c = 0; c < width; ++c) into[i * width + c] /= total[i];
    }
  });
}

}  // namespace fewbits
