#include "matmul/dense.h"

#include "kernels.h"
#include "platform/avx2.h"

namespace fewbits {
namespace {

template <Dense kKind>
float value_at(const uint8_t* w, size_t i) {
  if constexpr (kKind == Dense::kFloat32) return load<float>(w + 4 * i);
  const uint16_t bits = load<uint16_t>(w + 2 * i);
  return kKind == Dense::kFloat16 ? float_of(bits) : std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// In sixteen sums, so that additions do not wait for each other.
template <Dense kKind>
float dot(const uint8_t* w, const float* x, size_t n) {
  float lanes[16] = {}, sum = 0;
  size_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (size_t k = 0; k < 16; ++k) lanes[k] += value_at<kKind>(w, i + k) * x[i + k];
  for (const float lane : lanes) sum += lane;
  for (; i < n; ++i) sum += value_at<kKind>(w, i) * x[i];
  return sum;
}

#if defined(__x86_64__)
template <Dense kKind>
FEWBITS_AVX2_INLINE __m256 eight_at(const uint8_t* w) {
  if constexpr (kKind == Dense::kFloat32) return _mm256_loadu_ps(reinterpret_cast<const float*>(w));
  if constexpr (kKind == Dense::kFloat16) return _mm256_cvtph_ps(load_16(w));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16(w)), 16));
}

template <Dense kKind>
FEWBITS_AVX2 float dot_avx2(const uint8_t* w, const float* x, size_t n) {
  constexpr size_t kBytes = dense_bytes(kKind);
  __m256 sums_f32x8[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    _mm_prefetch(reinterpret_cast<const char*>(w + kBytes * i) + 1536, _MM_HINT_T0);
#pragma GCC unroll 4
    for (size_t k = 0; k < 4; ++k)
      sums_f32x8[k] = _mm256_fmadd_ps(eight_at<kKind>(w + kBytes * (i + 8 * k)), _mm256_loadu_ps(x + i + 8 * k), sums_f32x8[k]);
  }
  const __m256 all_f32x8 =
      _mm256_add_ps(_mm256_add_ps(sums_f32x8[0], sums_f32x8[1]), _mm256_add_ps(sums_f32x8[2], sums_f32x8[3]));
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, all_f32x8);
  float sum = dot<kKind>(w + kBytes * i, x + i, n - i);
  for (const float lane : lanes) sum += lane;
  return sum;
}
#endif

template <Dense kKind>
DotDense fastest([[maybe_unused]] const char* isa) {
#if defined(__x86_64__)
  if (has_avx2() && !(isa && std::strcmp(isa, "scalar") == 0)) return dot_avx2<kKind>;
#endif
  return dot<kKind>;
}

}  // namespace

DotDense find_dot_dense(Dense kind, const char* isa) {
  if (kind == Dense::kFloat32) return fastest<Dense::kFloat32>(isa);
  return kind == Dense::kFloat16 ? fastest<Dense::kFloat16>(isa) : fastest<Dense::kBfloat16>(isa);
}

}  // namespace fewbits
