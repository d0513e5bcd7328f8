// Products with packed weights against double precision, and activations against the obvious way to round them.
//
// The bound: sums of 16 or 32 products of integers are exact. Each is then multiplied by two scales, with a rounding each, and an
// offset's term likewise, whose sum of activations has one more. Then all are added, in some order: no term goes through more
// additions than there are terms, two for each 16 columns, and 8 more where lanes are added up. Every rounding is of at most half
// an eps of what is added up so far, which is no larger than the sum of |x| * size. A whole eps leaves room for the second order.
// Below 2^-126 roundings are absolute instead, of less than that for each block.
#include <cmath>
#include <limits>

#include "matmul/activations.h"
#include "matmul/exact.h"
#include "matmul/tiles.h"
#include "weights.h"

namespace fewbits::checks {
namespace {

constexpr double kEps = std::numeric_limits<float>::epsilon();

struct Rounded {  // rows of activations in int8, the obvious way
  size_t blocks;
  std::vector<int8_t> q;
  std::vector<float> scale;
  std::vector<int32_t> sums;
};

Rounded round_rows(const float* x, size_t rows, size_t cols) {
  Rounded rounded{(cols + 31) / 32, {}, {}, {}};
  rounded.q.assign(rows * rounded.blocks * 32, 0);
  rounded.scale.assign(rows * rounded.blocks, 0);
  rounded.sums.assign(rows * rounded.blocks * 2, 0);
  for (size_t row = 0; row < rows; ++row)
    for (size_t b = 0; b < rounded.blocks; ++b) {
      const size_t at = row * rounded.blocks + b, count = std::min<size_t>(32, cols - 32 * b);
      const float* const from = x + row * cols + 32 * b;
      float largest = 0;
      bool finite = true;
      for (size_t j = 0; j < count; ++j) {
        finite = finite && std::isfinite(from[j]);
        largest = std::max(largest, std::abs(from[j]));
      }
      rounded.scale[at] = finite ? largest / 127 : std::numeric_limits<float>::quiet_NaN();
      if (!(rounded.scale[at] > 0)) continue;
      for (size_t j = 0; j < count; ++j) {
        const float code = std::min(127.0f, std::max(-127.0f, std::nearbyint(from[j] / rounded.scale[at])));
        rounded.q[32 * at + j] = static_cast<int8_t>(code);
        rounded.sums[2 * at + j / 16] += static_cast<int32_t>(code);
      }
    }
  return rounded;
}

// Of very different sizes, with a block of nothing but zeros.
Guarded<float> activations(size_t rows, size_t cols, uint64_t seed) {
  Random random(seed);
  Guarded<float> x(rows * cols);
  for (size_t row = 0; row < rows; ++row) {
    const float size = std::ldexp(1.0f, static_cast<int>(random.below(16)) - 8);
    for (size_t j = 0; j < cols; ++j) x[row * cols + j] = j / 32 == 1 ? 0.0f : size * random.symmetric();
  }
  return x;
}

struct Expected {  // (rows, weights) each
  std::vector<double> product, allowed;
};

Expected multiply_plainly(const Rounded& x, const Values& values, size_t rows, size_t cols, size_t weights) {
  Expected expected;
  const double roundings = 2.0 * static_cast<double>((cols + 15) / 16) + 12, least = static_cast<double>(x.blocks) * 0x1p-126;
  for (size_t row = 0; row < rows; ++row)
    for (size_t w = 0; w < weights; ++w) {
      double sum = 0, size = 0;
      for (size_t j = 0; j < cols; ++j) {
        const double value = static_cast<double>(x.scale[row * x.blocks + j / 32]) * x.q[32 * row * x.blocks + j];
        sum += value * values.w[w * cols + j];
        size += std::abs(value) * values.size[w * cols + j];
      }
      expected.product.push_back(sum);
      expected.allowed.push_back(roundings * kEps * size + least);
    }
  return expected;
}

void compare(const Kernel& kernel, const Expected& expected, const float* out, size_t rows, size_t cols, size_t weights,
             const float* bias) {
  for (size_t i = 0; i < rows * weights; ++i) {
    const double sum = expected.product[i] + bias[i % weights];
    const double allowed = expected.allowed[i] + kEps * std::abs(sum);
    if (!(std::abs(out[i] - sum) <= allowed))
      fail("%s %s, product of %zu x %zu x %zu: row %zu, weight %zu is %.9g, not %.9g +- %.2g", kernel.isa, kernel.layout.format,
           rows, cols, weights, i / weights, i % weights, static_cast<double>(out[i]), sum, allowed);
  }
}

Guarded<float> multiply_with(const Kernel& kernel, const Weight& weight, const float* x, size_t rows, const float* bias,
                             int threads) {
  Guarded<float> out(rows * weight.rows);
  multiply(Product{kernel, weight.packed(), nullptr, rows, weight.cols, weight.rows, x, bias, out.data()}, threads);
  return out;
}

// The weight laid out for the registers, in memory beyond which nothing may be read; empty where it is read as it is stored.
Guarded<uint8_t> tiles_of(const Kernel& kernel, const Weight& weight) {
  if (!find_tiles(kernel.isa, kernel.of.bytes).dot) return Guarded<uint8_t>(0);
  Guarded<uint8_t> tiles(tiled_bytes(kernel, weight.rows, weight.cols));
  return tile(kernel, weight.packed(), weight.rows, weight.cols, tiles.data(), 2) ? std::move(tiles) : Guarded<uint8_t>(0);
}

void check_shape(const Kernel& kernel, const Weight& weight, const Guarded<float>& x, size_t rows) {
  const Values values = values_of(*find_kernel(weight.layout->format, "scalar"), weight);
  const Rounded rounded = round_rows(x.data(), rows, weight.cols);
  const Expected expected = multiply_plainly(rounded, values, rows, weight.cols, weight.rows);
  Guarded<float> bias(weight.rows);
  for (size_t i = 0; i < weight.rows; ++i) bias[i] = static_cast<float>(i) - 3;
  const float* const end = x.data() + rows * weight.cols;
  const Guarded<uint8_t> tiles = tiles_of(kernel, weight);
  // one row streams the packed bytes by dot products, several go through panels
  for (const size_t some : {size_t{1}, size_t{2}, size_t{3}, size_t{4}, size_t{5}, size_t{7}, rows}) {
    if (some > rows) continue;
    // the last rows, so that x ends where nothing may be read
    const size_t skipped = (rows - some) * weight.rows;
    const Expected last{{expected.product.begin() + static_cast<ptrdiff_t>(skipped), expected.product.end()},
                        {expected.allowed.begin() + static_cast<ptrdiff_t>(skipped), expected.allowed.end()}};
    const Guarded<float> out = multiply_with(kernel, weight, end - some * weight.cols, some, bias.data(), 1);
    compare(kernel, last, out.data(), some, weight.cols, weight.rows, bias.data());
    if (tiles.size() == 0) continue;
    Guarded<float> tiled(some * weight.rows);
    multiply(
        Product{kernel, {}, tiles.data(), some, weight.cols, weight.rows, end - some * weight.cols, bias.data(), tiled.data()},
        1);
    compare(kernel, last, tiled.data(), some, weight.cols, weight.rows, bias.data());
  }
}

// The largest and the smallest codes times 127 everywhere: what 16 bits would hold is exceeded at once, if it can be.
void check_extremes(const Kernel& kernel) {
  const Kernel& scalar = *find_kernel(kernel.layout.format, "scalar");
  if (!find_packer(kernel.layout.format)) return;  // its reader is that of a format with a packer
  constexpr size_t kCols = 1024, kWeights = 35, kRows = 5;
  const size_t codes = count_codes(scalar);
  for (const size_t code : {size_t{0}, codes / 2 - 1, codes - 1}) {
    const Weight weight =
        packed_codes(kernel.layout, kWeights, kCols, code, std::vector<uint8_t>(kWeights * kCols, static_cast<uint8_t>(code)));
    for (const float sign : {1.0f, -1.0f}) {
      Guarded<float> x(kRows * kCols);
      std::fill_n(x.data(), x.size(), sign);
      check_shape(kernel, weight, x, kRows);
    }
  }
}

void check_nan(const Kernel& kernel) {
  const size_t cols = widths_of(kernel.layout).back(), weights = 5;
  const Weight weight = any_numbers(kernel.layout, weights, cols, 4);
  for (const size_t rows : {1, 3}) {
    Guarded<float> x = activations(rows, cols, 5);
    x[cols - 1] = std::numeric_limits<float>::infinity();
    const Guarded<float> out = multiply_with(kernel, weight, x.data(), rows, nullptr, 1);
    for (size_t i = 0; i < rows * weights; ++i)
      if (std::isnan(out[i]) != (i < weights)) fail("%s %s: an infinity is hidden, or spreads", kernel.isa, kernel.layout.format);
  }
}

// Activations that are not rounded: a sum of `cols` products, in any order, is off by at most as many roundings.
void check_exact(const Kernel& kernel, const Weight& weight, const Guarded<float>& x, size_t rows) {
  const DecodeRow decode_row = find_kernel(weight.layout->format, "scalar")->of.decode_row;
  std::vector<float> decoded(weight.rows * weight.cols);
  for (size_t w = 0; w < weight.rows; ++w)
    decode_row(*weight.layout, weight.packed().at(w).data(), weight.cols, &decoded[w * weight.cols], false);
  const float* const end = x.data() + rows * weight.cols;
  for (const size_t some : {size_t{1}, rows}) {
    Guarded<float> out(some * weight.rows);
    const float* const from = end - some * weight.cols;
    multiply_exactly(Product{kernel, weight.packed(), nullptr, some, weight.cols, weight.rows, from, nullptr, out.data()}, 1);
    for (size_t i = 0; i < some * weight.rows; ++i) {
      double sum = 0, size = 0;
      for (size_t j = 0; j < weight.cols; ++j) {
        const double term =
            static_cast<double>(from[i / weight.rows * weight.cols + j]) * decoded[i % weight.rows * weight.cols + j];
        sum += term;
        size += std::abs(term);
      }
      const double allowed = static_cast<double>(weight.cols + 3) * (kEps * size + 0x1p-126);
      const bool same = std::isfinite(sum) ? std::abs(out[i] - sum) <= allowed : !std::isfinite(out[i]);
      if (!same)
        fail("%s %s, exact product of %zu x %zu x %zu: %zu is %.9g, not %.9g", kernel.isa, kernel.layout.format, some,
             weight.cols, weight.rows, i, static_cast<double>(out[i]), sum);
    }
  }
}

}  // namespace

void check_activations(const std::string& isa) {
  constexpr size_t kRows = 3;
  now(isa, "activations");
  for (const size_t cols : {1, 16, 31, 32, 33, 96, 173}) {
    for (int special = 0; special < 5; ++special) {
      Guarded<float> x = activations(kRows, cols, cols);
      const size_t at = cols / 2;
      if (special == 1) x[at] = std::numeric_limits<float>::quiet_NaN();
      if (special == 2) x[at] = -std::numeric_limits<float>::infinity();
      if (special == 3)  // halves: the largest is 127
        for (size_t i = 0; i < x.size(); ++i) x[i] = i % 32 ? static_cast<float>(i % 32) - 15.5f : 127.0f;
      if (special == 4)  // subnormals, whose scale is hardly a number
        for (size_t i = 0; i < x.size(); ++i) x[i] *= 0x1p-140f;
      const size_t blocks = padded_columns(cols) / 32;
      Guarded<int8_t> q(kRows * blocks * 32);
      Guarded<float> scale(kRows * blocks);
      Guarded<int32_t> sums(kRows * blocks * 2);
      QuantizedRows into{0, 0, 0, q.data(), scale.data(), sums.data()};
      quantize_rows(isa.c_str(), x.data(), kRows, cols, into, 1);
      const Rounded expected = round_rows(x.data(), kRows, cols);
      bool same =
          !std::memcmp(q.data(), expected.q.data(), q.size()) && !std::memcmp(sums.data(), expected.sums.data(), 4 * sums.size());
      for (size_t i = 0; i < scale.size(); ++i)
        same = same && (scale[i] == expected.scale[i] || (std::isnan(scale[i]) && std::isnan(expected.scale[i])));
      if (!same) fail("%s: activations of %zu columns, case %d, are not rounded as they should be", isa.c_str(), cols, special);
    }
  }
}

void check_products(const std::string& isa) {
  size_t formats = 0;
  for (const Kernel* kernel = first_kernel(); kernel; kernel = kernel->next) {
    if (kernel->isa != isa) continue;
    now(isa, kernel->layout.format);
    for (const size_t cols : widths_of(kernel->layout))
      check_exact(*kernel, any_numbers(kernel->layout, 7, cols, cols), activations(3, cols, cols), 3);
    if (!kernel->of.dot_row) continue;
    ++formats;
    constexpr size_t kRows = 13;
    for (const size_t cols : widths_of(kernel->layout))
      for (const size_t weights : {1, 35})
        check_shape(*kernel, any_numbers(kernel->layout, weights, cols, cols + weights), activations(kRows, cols, cols), kRows);
    check_extremes(*kernel);
    check_nan(*kernel);
  }
  std::printf("%-7s %3zu formats multiply\n", isa.c_str(), formats);
}

}  // namespace fewbits::checks
