// int8 times int8 is exact for all inputs: sums in 64 bits are the judge. And rows of floats become the int8 that they should.
#include <algorithm>
#include <cmath>
#include <limits>

#include "checks.h"
#include "matmul/w8a8.h"

namespace fewbits::checks {
namespace {

struct Case {
  size_t rows, cols, weights;
  int x, w;  // everywhere, or random where 1000
};

constexpr int kRandom = 1000;

void fill(Guarded<int8_t>& into, int value, Random& random) {
  for (size_t i = 0; i < into.size(); ++i)
    into[i] = static_cast<int8_t>(value == kRandom ? static_cast<int>(random.below(256)) - 128 : value);
}

void check_case(const std::string& isa, const Case& shape) {
  Random random(shape.cols);
  Guarded<int8_t> x(shape.rows * shape.cols), w(shape.weights * shape.cols);
  fill(x, shape.x, random);
  fill(w, shape.w, random);
  if (shape.x == kRandom)  // rows without a -128, beside rows with one
    for (size_t i = 0; i < x.size(); ++i)
      if (i / shape.cols % 8 < 4 && x[i] == -128) x[i] = 127;
  Guarded<float> x_scale(shape.rows), w_scale(shape.weights), bias(shape.weights), out(shape.rows * shape.weights);
  for (size_t i = 0; i < shape.rows; ++i) x_scale[i] = random.symmetric();
  for (size_t i = 0; i < shape.weights; ++i) {
    w_scale[i] = random.symmetric();
    bias[i] = random.symmetric();
  }
  multiply_integers(
      isa.c_str(),
      {shape.rows, shape.cols, shape.weights, x.data(), x_scale.data(), w.data(), w_scale.data(), bias.data(), out.data()}, 1);
  for (size_t r = 0; r < shape.rows; ++r)
    for (size_t i = 0; i < shape.weights; ++i) {
      int64_t sum = 0;
      for (size_t j = 0; j < shape.cols; ++j) sum += int64_t{x[r * shape.cols + j]} * w[i * shape.cols + j];
      const float product = static_cast<float>(sum) * (x_scale[r] * w_scale[i]), expected = product + bias[i];
      if (out[r * shape.weights + i] != expected)
        fail("%s int8 product of %zu x %zu x %zu, x %d, w %d: row %zu, weight %zu is %.9g, not %.9g", isa.c_str(), shape.rows,
             shape.cols, shape.weights, shape.x, shape.w, r, i, static_cast<double>(out[r * shape.weights + i]),
             static_cast<double>(expected));
    }
}

// A row's largest at 127, halves to even; what is not a number leaves no codes.
void check_tokens(const std::string& isa) {
  for (const size_t cols : {1, 7, 32, 45, 1000}) {
    constexpr size_t kRows = 6;
    Random random(cols);
    Guarded<float> x(kRows * cols), scale(kRows);
    Guarded<int8_t> codes(kRows * cols);
    for (size_t i = 0; i < x.size(); ++i) x[i] = random.symmetric();
    const size_t middle = cols / 2;
    std::fill_n(x.data() + cols, cols, 0.0f);
    for (size_t j = 0; j < cols; ++j) x[2 * cols + j] = j == middle ? -127.0f : static_cast<float>(j % 200) * 0.5f;  // scale 1
    x[3 * cols + middle] = std::numeric_limits<float>::quiet_NaN();
    x[4 * cols + middle] = -std::numeric_limits<float>::infinity();
    for (size_t j = 0; j < cols; ++j) x[5 * cols + j] *= 0x1p-140f;
    quantize_tokens(isa.c_str(), x.data(), kRows, cols, codes.data(), scale.data(), 1);
    for (size_t row = 0; row < kRows; ++row) {
      float largest = 0;
      for (size_t j = 0; j < cols; ++j) largest = std::max(largest, std::abs(x[row * cols + j]));
      const bool finite = row != 3 && row != 4;
      const float expected = finite ? largest / 127 : std::numeric_limits<float>::quiet_NaN();
      if (finite ? scale[row] != expected : !std::isnan(scale[row]))
        fail("%s: the scale of a row of %zu is %a, not %a", isa.c_str(), cols, static_cast<double>(scale[row]),
             static_cast<double>(expected));
      for (size_t j = 0; j < cols; ++j) {
        const float code =
            expected > 0 ? std::min(127.0f, std::max(-127.0f, std::nearbyint(x[row * cols + j] / expected))) : 0.0f;
        if (codes[row * cols + j] != static_cast<int8_t>(code))
          fail("%s: %a in a row of %zu becomes %d, not %g", isa.c_str(), static_cast<double>(x[row * cols + j]), cols,
               codes[row * cols + j], static_cast<double>(code));
      }
    }
  }
}

}  // namespace

void check_integer_products(const std::string& isa) {
  now(isa, "int8 products");
  check_tokens(isa);
  for (const size_t rows : {1, 2, 3, 4, 5, 12, 13})
    for (const size_t cols : {1, 3, 31, 32, 33, 515, 1030})
      check_case(isa, {rows, cols, rows == 5 ? size_t{33} : size_t{7}, kRandom, kRandom});
  for (const int x : {-128, -127, 127})
    for (const int w : {-128, -127, 127})
      for (const size_t rows : {1, 6}) check_case(isa, {rows, 1027, 35, x, w});
  for (const int x : {-128, 127})
    for (const int w : {-128, 127})
      for (const size_t rows : {1, 2}) check_case(isa, {rows, kMostIntegerColumns, 3, x, w});  // the largest sums that there are
}

}  // namespace fewbits::checks
