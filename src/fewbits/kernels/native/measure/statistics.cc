// Statistics of activations in one pass: sum, sum of squares, minimum and maximum of each column; and a histogram of all values.
//
// x is (rows, cols) float32, read once from memory: four rows at a time, first into the columns' running sums, then, still in the
// first-level cache, into bins. The width of the bins must be known before a value is binned; the first step finds the largest
// |x|, and if it exceeds the histogram's reach, bins are merged in pairs (calibration/histogram.py says why that is exact).
//
// 4 bytes moved per value; bound by the counting, two to three cycles per value. Counting the same bin twice in a row waits for
// the store, so each bin has four copies that take turns, of 16 bits, so that they fit the first-level cache. Nanoseconds per
// value for counting alone, normal values / all equal: 16 bits x 4 copies 0.78 / 0.64, 32 bits x 4 0.92 / 0.64, x 2 0.80 / 1.25,
// x 1 0.78 / 2.24.
//
// Sums are float64, in the order of calibration/moments.py; squares of float32 are exact in float64. So every ISA, any
// number of threads and the reference in torch give the same bits.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "platform/avx2.h"
#include "platform/threads.h"

namespace nb = nanobind;

namespace fewbits {
namespace {

constexpr size_t kChunk = 256;    // rows of one partial sum, as in calibration/moments.py
constexpr size_t kFour = 4;       // rows taken together
constexpr int kBins = 4096;       // these three as in calibration/histogram.py
constexpr int kHalf = kBins / 2;  // bin of zero
constexpr int kSmallest = -100;   // exponent of the least reach
constexpr size_t kCopies = 4;
constexpr size_t kPiece = 1 << 16;  // values to count before checking whether 16 bits still hold the counts
constexpr uint32_t kInfinity = 0x7f800000;

struct Columns {  // running values of each column; sums cover the current chunk
  double* sum;
  double* squares;
  float* low;
  float* high;
};

// Adds `rows` (1 to 4) rows, which follow each other in memory, in columns [from, cols); gives the largest |x|, as bits.
using Accumulate = uint32_t (*)(const float* x, size_t rows, size_t from, size_t cols, const Columns& into);
// Counts n values, all below the reach in magnitude; a copy takes every fourth. Scale is bins per unit; `zero` points to the
// copies of zero's bin.
using Count = void (*)(const float* x, size_t n, float scale, uint16_t* zero);

uint32_t accumulate_scalar(const float* x, size_t rows, size_t from, size_t cols, const Columns& into) {
  uint32_t largest = 0;
  for (size_t col = from; col < cols; ++col) {
    double v[kFour] = {};
    for (size_t row = 0; row < rows; ++row) {
      const float value = x[row * cols + col];
      v[row] = value;
      into.low[col] = std::min(into.low[col], value);
      into.high[col] = std::max(into.high[col], value);
      largest = std::max(largest, std::bit_cast<uint32_t>(value) & 0x7fffffff);
    }
    into.sum[col] += (v[0] + v[1]) + (v[2] + v[3]);
    into.squares[col] += (v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3]);
  }
  return largest;
}

void count_scalar(const float* x, size_t n, float scale, uint16_t* zero) {
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i]);
    const int32_t magnitude = static_cast<int32_t>(std::fabs(x[i]) * scale);
    const int32_t negative = bits > 0x80000000u ? -1 : 0;                                                // negative zero is zero
    ++zero[(magnitude ^ negative) * static_cast<int32_t>(kCopies) + static_cast<int32_t>(i % kCopies)];  // m ^ -1 is -1 - m
  }
}

#if defined(__x86_64__)
// The lower (0) or upper (1) four of eight floats, as doubles.
template <int Half>
FEWBITS_AVX2 inline __m256d widen(__m256 v_f32x8) {
  return _mm256_cvtps_pd(_mm256_extractf128_ps(v_f32x8, Half));
}

FEWBITS_AVX2 inline void add_four_rows(__m256d a_f64x4, __m256d b_f64x4, __m256d c_f64x4, __m256d d_f64x4, double* sum,
                                       double* squares) {
  const __m256d of_sum = _mm256_add_pd(_mm256_add_pd(a_f64x4, b_f64x4), _mm256_add_pd(c_f64x4, d_f64x4));
  const __m256d ab = _mm256_add_pd(_mm256_mul_pd(a_f64x4, a_f64x4), _mm256_mul_pd(b_f64x4, b_f64x4));
  const __m256d cd = _mm256_add_pd(_mm256_mul_pd(c_f64x4, c_f64x4), _mm256_mul_pd(d_f64x4, d_f64x4));
  _mm256_storeu_pd(sum, _mm256_add_pd(_mm256_loadu_pd(sum), of_sum));
  _mm256_storeu_pd(squares, _mm256_add_pd(_mm256_loadu_pd(squares), _mm256_add_pd(ab, cd)));
}

FEWBITS_AVX2 uint32_t accumulate_avx2(const float* x, size_t rows, size_t from, size_t cols, const Columns& into) {
  if (rows != kFour) return accumulate_scalar(x, rows, from, cols, into);
  const __m256i magnitude_i32x8 = _mm256_set1_epi32(0x7fffffff);
  __m256i largest_i32x8 = _mm256_setzero_si256();
  size_t col = from;
  for (; col + 8 <= cols; col += 8) {
    const __m256 a = _mm256_loadu_ps(x + col), b = _mm256_loadu_ps(x + cols + col);
    const __m256 c = _mm256_loadu_ps(x + 2 * cols + col), d = _mm256_loadu_ps(x + 3 * cols + col);
    const __m256 low = _mm256_min_ps(_mm256_min_ps(a, b), _mm256_min_ps(c, d));
    const __m256 high = _mm256_max_ps(_mm256_max_ps(a, b), _mm256_max_ps(c, d));
    _mm256_storeu_ps(into.low + col, _mm256_min_ps(_mm256_loadu_ps(into.low + col), low));
    _mm256_storeu_ps(into.high + col, _mm256_max_ps(_mm256_loadu_ps(into.high + col), high));
    for (const __m256 v : {a, b, c, d})  // by their bits, because min and max would miss a NaN
      largest_i32x8 = _mm256_max_epi32(largest_i32x8, _mm256_and_si256(_mm256_castps_si256(v), magnitude_i32x8));
    add_four_rows(widen<0>(a), widen<0>(b), widen<0>(c), widen<0>(d), into.sum + col, into.squares + col);
    add_four_rows(widen<1>(a), widen<1>(b), widen<1>(c), widen<1>(d), into.sum + col + 4, into.squares + col + 4);
  }
  alignas(32) uint32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), largest_i32x8);
  const uint32_t rest = col < cols ? accumulate_scalar(x, rows, col, cols, into) : 0;
  return std::max(rest, *std::max_element(lanes, lanes + 8));
}

FEWBITS_AVX2 void count_avx2(const float* x, size_t n, float scale, uint16_t* zero) {
  const __m256i magnitude_i32x8 = _mm256_set1_epi32(0x7fffffff), negative_zero_i32x8 = _mm256_set1_epi32(INT32_MIN);
  const __m256i half_i32x8 = _mm256_set1_epi32(kHalf);
  const __m256 scale_f32x8 = _mm256_set1_ps(scale);
  uint16_t* const lowest = zero - kHalf * kCopies;
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256i bits = load_32(reinterpret_cast<const uint8_t*>(x + i));
    const __m256 abs_f32x8 = _mm256_castsi256_ps(_mm256_and_si256(bits, magnitude_i32x8));
    const __m256i m_i32x8 = _mm256_cvttps_epi32(_mm256_mul_ps(abs_f32x8, scale_f32x8));
    const __m256i negative = _mm256_andnot_si256(_mm256_cmpeq_epi32(bits, negative_zero_i32x8), _mm256_srai_epi32(bits, 31));
    const __m256i bin = _mm256_add_epi32(_mm256_xor_si256(m_i32x8, negative), half_i32x8);
    alignas(32) uint64_t pairs[4];  // two bins in each, for half as many loads
    _mm256_store_si256(reinterpret_cast<__m256i*>(pairs), bin);
    static_assert(kCopies == 4);
    for (size_t lane = 0; lane < 4; ++lane) {
      ++lowest[(pairs[lane] & 0xffffffff) * kCopies + 2 * (lane % 2)];
      ++lowest[(pairs[lane] >> 32) * kCopies + 2 * (lane % 2) + 1];
    }
  }
  count_scalar(x + i, n - i, scale, zero);
}
#endif

class GrowingHistogram {
 public:
  explicit GrowingHistogram(int exponent) : exponent_(exponent), counts_(kBins), pending_(kBins * kCopies) {}

  void add(const float* x, size_t n, uint32_t largest, Count count) {
    const int exponent = static_cast<int>(largest >> 23) - 126;  // |x| < 2 ** this
    if (exponent > exponent_) widen(exponent);
    for (size_t from = 0; from < n; from += kPiece) {
      const size_t piece = std::min(kPiece, n - from), turns = (piece + kCopies - 1) / kCopies;
      if (turns_ + turns > std::numeric_limits<uint16_t>::max()) settle();
      turns_ += turns;
      count(x + from, piece, std::ldexp(1.0f, 11 - exponent_), pending_.data() + kHalf * kCopies);
    }
  }

  void widen(int exponent) {
    settle();
    const int shift = std::min(exponent - exponent_, 12);
    std::vector<int64_t> wider(kBins);
    for (int bin = -kHalf; bin < kHalf; ++bin) wider[(bin >> shift) + kHalf] += counts_[bin + kHalf];
    counts_.swap(wider);
    exponent_ = exponent;
  }

  void settle() {  // adds the copies to the counts
    for (size_t i = 0; i < pending_.size(); ++i) counts_[i / kCopies] += pending_[i];
    std::fill(pending_.begin(), pending_.end(), 0);
    turns_ = 0;
  }

  int exponent() const { return exponent_; }
  const std::vector<int64_t>& counts() const { return counts_; }

 private:
  int exponent_;
  std::vector<int64_t> counts_;
  std::vector<uint16_t> pending_;
  size_t turns_ = 0;  // upper bound of a count in `pending_`
};

struct Isa {
  const char* name;
  bool (*runs_here)();
  Accumulate accumulate;
  Count count;
};

const Isa kIsas[] = {
#if defined(__x86_64__)
    {"avx2", has_avx2, accumulate_avx2, count_avx2},
#endif
    {"scalar", runs_everywhere, accumulate_scalar, count_scalar},
};

// The results of one thread, of its chunks.
struct Share {
  std::vector<float> low, high;
  GrowingHistogram histogram;

  Share(size_t cols, int exponent)
      : low(cols, std::numeric_limits<float>::infinity()),
        high(cols, -std::numeric_limits<float>::infinity()),
        histogram(exponent) {}

  // Rows [from, to) of x; false if a value is not finite.
  bool take(const Isa& isa, const float* x, size_t from, size_t to, size_t cols, double* sum, double* squares) {
    const Columns into{sum, squares, low.data(), high.data()};
    for (size_t row = from; row < to; row += kFour) {
      const size_t rows = std::min(kFour, to - row);
      const uint32_t largest = isa.accumulate(x + row * cols, rows, 0, cols, into);
      if (largest >= kInfinity) return false;
      histogram.add(x + row * cols, rows * cols, largest, isa.count);
    }
    return true;
  }
};

template <typename T>
using Row = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Returns the exponent of the histogram's reach, at least `exponent`; nothing if a value is not finite (the results are then
// void).
std::optional<int> statistics(const std::string& name, Floats x, Row<double> sum, Row<double> squares, Row<float> low,
                              Row<float> high, Row<int64_t> counts, int exponent, int threads) {
  const Isa* const isa =
      std::find_if(std::begin(kIsas), std::end(kIsas), [&](auto& i) { return i.name == name && i.runs_here(); });
  if (isa == std::end(kIsas)) throw std::invalid_argument("no " + name + " kernel takes statistics here");
  const size_t rows = x.shape(0), cols = x.shape(1);
  if (sum.shape(0) != cols || squares.shape(0) != cols || low.shape(0) != cols || high.shape(0) != cols ||
      counts.shape(0) != kBins)
    throw std::invalid_argument("statistics of " + std::to_string(cols) + " columns need as many sums and extremes, and " +
                                std::to_string(kBins) + " counts");
  if (rows == 0 || cols == 0) throw std::invalid_argument("statistics need a row and a column");
  if (exponent < kSmallest || exponent > 128) throw std::invalid_argument("a histogram's reach is 2 ** -100 to 2 ** 128");
  const float* const from = x.data();
  nb::gil_scoped_release released;

  const size_t chunks = (rows + kChunk - 1) / kChunk;
  const size_t shares = shares_of(threads, chunks);
  std::vector<double> partial(2 * chunks * cols);  // 1/64 of x
  std::vector<Share> found(shares, Share(cols, exponent));
  std::atomic<bool> finite = true;
  const auto work = [&](size_t i) {
    for (size_t chunk = chunks * i / shares; chunk < chunks * (i + 1) / shares && finite; ++chunk) {
      double* const sums = partial.data() + 2 * chunk * cols;
      if (!found[i].take(*isa, from, chunk * kChunk, std::min(rows, (chunk + 1) * kChunk), cols, sums, sums + cols))
        finite = false;
    }
    found[i].histogram.settle();
  };
  run_shares(shares, work);
  if (!finite) return std::nullopt;

  int reach = exponent;
  for (const Share& share : found) reach = std::max(reach, share.histogram.exponent());
  std::fill_n(counts.data(), kBins, 0);
  for (Share& share : found) {
    if (share.histogram.exponent() < reach) share.histogram.widen(reach);
    for (int bin = 0; bin < kBins; ++bin) counts.data()[bin] += share.histogram.counts()[bin];
  }
  for (size_t col = 0; col < cols; ++col) {
    double of_sum = 0, of_squares = 0;
    for (size_t chunk = 0; chunk < chunks; ++chunk) {
      of_sum += partial[2 * chunk * cols + col];
      of_squares += partial[(2 * chunk + 1) * cols + col];
    }
    float least = found[0].low[col], greatest = found[0].high[col];
    for (const Share& share : found) {
      least = std::min(least, share.low[col]);
      greatest = std::max(greatest, share.high[col]);
    }
    sum.data()[col] = of_sum;
    squares.data()[col] = of_squares;
    low.data()[col] = least + 0.0f;  // no negative zeros: which of two zeros counts as less depends on the ISA
    high.data()[col] = greatest + 0.0f;
  }
  return reach;
}

std::vector<std::string> statistics_isas() {  // those that run here, fastest first
  std::vector<std::string> names;
  for (const Isa& isa : kIsas)
    if (isa.runs_here()) names.emplace_back(isa.name);
  return names;
}

}  // namespace

void register_statistics(nb::module_& m) {
  m.def("statistics_isas", &statistics_isas);
  m.def("statistics", &statistics, nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("sum").noconvert(),
        nb::arg("squares").noconvert(), nb::arg("low").noconvert(), nb::arg("high").noconvert(), nb::arg("counts").noconvert(),
        nb::arg("exponent"), nb::arg("threads"));
}

}  // namespace fewbits
