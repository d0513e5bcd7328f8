// RMSNorm and the quantization of its result to int8, in one pass over memory: y = x * r * weight, r = 1 / sqrt(mean(x^2) + eps).
//
// x is read once, 4 bytes a value; a row comes from the first cache when it is read again to be scaled. Codes are made from
// pieces of y on the stack, so y itself is written only if somebody wants it.
//
// The sum of squares is float64 in 16 lanes, column i in lane i mod 16, added in halves at the end: each square of a float32 is
// exact, the order is the same for every ISA, and so are the bits. r is float64 until it is rounded once, to float32; then
// y = (x * r) * weight rounds twice. So |y - exact| <= 3 * 2**-24 |exact| to first order, whatever the width.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "activations.h"
#include "avx512.h"
#include "kernels.h"
#include "threads.h"

namespace nb = nanobind;

namespace fewbits {
namespace {

constexpr size_t kLanes = 16;
constexpr size_t kPiece = 1024;  // columns of y on the stack: whole blocks

using AddSquares = void (*)(const float* x, size_t cols, double* lanes);
using Scale = void (*)(const float* x, const float* weight, float by, size_t cols, float* y);

void add_squares_scalar(const float* x, size_t cols, double* lanes) {
  for (size_t i = 0; i < cols; ++i) lanes[i % kLanes] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
}

void scale_scalar(const float* x, const float* weight, float by, size_t cols, float* y) {
  for (size_t i = 0; i < cols; ++i) y[i] = x[i] * by * weight[i];
}

#if defined(__x86_64__)
FEWBITS_AVX2 void add_squares_avx2(const float* x, size_t cols, double* lanes) {
  __m256d sum_f64x4[4];
  for (size_t i = 0; i < 4; ++i) sum_f64x4[i] = _mm256_loadu_pd(lanes + 4 * i);
  size_t col = 0;
  for (; col + kLanes <= cols; col += kLanes)
    for (size_t i = 0; i < 4; ++i) {
      const __m256d v = _mm256_cvtps_pd(_mm_loadu_ps(x + col + 4 * i));
      sum_f64x4[i] = _mm256_add_pd(sum_f64x4[i], _mm256_mul_pd(v, v));
    }
  for (size_t i = 0; i < 4; ++i) _mm256_storeu_pd(lanes + 4 * i, sum_f64x4[i]);
  add_squares_scalar(x + col, cols - col, lanes);
}

FEWBITS_AVX2 void scale_avx2(const float* x, const float* weight, float by, size_t cols, float* y) {
  const __m256 by_f32x8 = _mm256_set1_ps(by);
  size_t col = 0;
  for (; col + 8 <= cols; col += 8)
    _mm256_storeu_ps(y + col, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + col), by_f32x8), _mm256_loadu_ps(weight + col)));
  scale_scalar(x + col, weight + col, by, cols - col, y + col);
}
#endif

struct Isa {
  const char* name;
  bool (*runs_here)();
  AddSquares add_squares;
  Scale scale;
};

// With AVX-512 only the quantization is its own.
const Isa kIsas[] = {
#if defined(__x86_64__)
    {"avx512", has_avx512, add_squares_avx2, scale_avx2},
    {"avx2", has_avx2, add_squares_avx2, scale_avx2},
#endif
    {"scalar", runs_everywhere, add_squares_scalar, scale_scalar},
};

const Isa& isa_named(const std::string& name) {
  for (const Isa& isa : kIsas)
    if (isa.name == name && isa.runs_here()) return isa;
  throw std::invalid_argument("no " + name + " kernel normalizes rows here");
}

float reciprocal_root(const Isa& isa, const float* x, size_t cols, double eps) {
  double lanes[kLanes] = {};
  isa.add_squares(x, cols, lanes);
  for (size_t half = kLanes / 2; half > 0; half /= 2)
    for (size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return static_cast<float>(1 / std::sqrt(lanes[0] / static_cast<double>(cols) + eps));
}

using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatsInto = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatList = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using CodesInto = nb::ndarray<int8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using SumsInto = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <typename Array>
void needs_shape(const char* name, const Array& array, size_t rows, size_t cols) {
  if (array.shape(0) != rows || array.shape(1) != cols)
    throw std::invalid_argument(std::string("`") + name + "` needs " + std::to_string(rows) + " x " + std::to_string(cols) +
                                ", it has " + std::to_string(array.shape(0)) + " x " + std::to_string(array.shape(1)));
}

QuantizedRows checked(size_t rows, size_t cols, const CodesInto& q, const FloatsInto& scale, const SumsInto& sums) {
  const size_t padded = padded_columns(cols);
  needs_shape("q", q, rows, padded);
  needs_shape("scale", scale, rows, padded / kActivationBlock);
  needs_shape("sums", sums, rows, padded / kActivationSum);
  return {rows, cols, padded, q.data(), scale.data(), sums.data()};
}

void quantize(const std::string& isa, const Floats& x, CodesInto q, FloatsInto scale, SumsInto sums, int threads) {
  QuantizedRows into = checked(x.shape(0), x.shape(1), q, scale, sums);
  const float* const from = x.data();
  nb::gil_scoped_release released;
  quantize_rows(isa.c_str(), from, into.rows, into.cols, into, threads);
}

void rms_norm(const std::string& name, const Floats& x, const FloatList& weight, double eps, CodesInto q, FloatsInto scale,
              SumsInto sums, const std::optional<FloatsInto>& out, int threads) {
  constexpr size_t kWorthAShare = 1 << 14;  // values, some 5 us of work
  const Isa& isa = isa_named(name);
  const QuantizeRow quantize_piece = find_quantize_row(name.c_str());
  const size_t rows = x.shape(0), cols = x.shape(1);
  const QuantizedRows into = checked(rows, cols, q, scale, sums);
  if (weight.shape(0) != cols)
    throw std::invalid_argument("a norm of " + std::to_string(cols) + " columns needs as many weights");
  if (out) needs_shape("out", *out, rows, cols);
  const float *const from = x.data(), *const by = weight.data();
  float* const y = out ? out->data() : nullptr;
  nb::gil_scoped_release released;
  const size_t shares = shares_of(threads, std::min(rows, rows * cols / kWorthAShare));
  run_shares(shares, [&](size_t share) {
    float on_stack[kPiece];
    for (size_t row = rows * share / shares; row < rows * (share + 1) / shares; ++row) {
      const float* const x_row = from + row * cols;
      const float r = reciprocal_root(isa, x_row, cols, eps);
      for (size_t col = 0; col < cols; col += kPiece) {
        const size_t n = std::min(kPiece, cols - col), at = row * into.padded + col;
        float* const piece = y ? y + row * cols + col : on_stack;
        isa.scale(x_row + col, by + col, r, n, piece);
        quantize_piece(piece, n, into.q + at, into.scale + at / kActivationBlock, into.sums + at / kActivationSum);
      }
    }
  });
}

std::vector<std::string> norm_isas() {  // that run here, fastest first
  std::vector<std::string> names;
  for (const Isa& isa : kIsas)
    if (isa.runs_here()) names.emplace_back(isa.name);
  return names;
}

}  // namespace

void register_norm(nb::module_& m) {
  m.def("norm_isas", &norm_isas);
  m.def("quantize_rows", &quantize, nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("q").noconvert(),
        nb::arg("scale").noconvert(), nb::arg("sums").noconvert(), nb::arg("threads"));
  m.def("rms_norm", &rms_norm, nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("weight").noconvert(), nb::arg("eps"),
        nb::arg("q").noconvert(), nb::arg("scale").noconvert(), nb::arg("sums").noconvert(), nb::arg("out").noconvert().none(),
        nb::arg("threads"));
}

}  // namespace fewbits
