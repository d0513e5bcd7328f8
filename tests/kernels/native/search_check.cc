// Searches find the same bytes with every instruction set, and on every processor: the digest.
#include <algorithm>
#include <cmath>
#include <limits>

#include "search/quantize.h"
#include "searching.h"

namespace fewbits::checks {
namespace {

// About as a weight is distributed: near to Gaussian, of variance 1. One number after another: compilers differ in which operand
// of a sum, and which argument of a call, they compute first.
float usual(Random& random) {
  float sum = 0;
  for (int i = 0; i < 3; ++i) sum += random.symmetric();
  return sum;
}

void compare(const std::string& isa, const char* what, const Results& results, const Results& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto& [name, bytes] = results[i];
    const auto& other = expected[i].second;
    const auto at = static_cast<size_t>(std::mismatch(bytes.begin(), bytes.end(), other.begin()).first - bytes.begin());
    if (at < bytes.size())
      fail("%s %s: byte %zu of %zu of the %s is %d, with scalar code %d", isa.c_str(), what, at, bytes.size(), name.c_str(),
           bytes[at], other[at]);
  }
}

}  // namespace

Guarded<float> draw_rows(Random& random) {
  Guarded<float> x(kSearchedRows * kSearchedCols);
  for (size_t row = 0; row < kSearchedRows; ++row) {
    float* const weights = x.data() + row * kSearchedCols;
    const int wide = static_cast<int>(random.below(260)) - 140, faint = static_cast<int>(random.below(9)) - 25;
    for (size_t j = 0; j < kSearchedCols; ++j) {
      weights[j] = usual(random);
      if (row >= 10 && row < 18) weights[j] = std::ldexp(weights[j], wide);
      if (row >= 18 && row < 23) weights[j] = std::ldexp(weights[j], faint);
      if (row == 23) weights[j] = 0.0f;
      if (row == 24) weights[j] = -0.0f;
      if (row == 25) weights[j] = j == 3 ? -2.5f : 0.0f;
      if (row == 26) weights[j] = 0.375f;
      if (row == 27) weights[j] = std::numeric_limits<float>::lowest();
      if (row >= 28 && row < 31) weights[j] = std::nearbyint(2 * weights[j]);
    }
    if (row == 31) std::fill_n(weights, 32, 0.0f);
    if (row == 32) weights[77] = 3e4f;
  }
  return x;
}

Guarded<float> draw_importance(bool weighted, Random& random) {
  Guarded<float> importance(kSearchedCols);
  for (size_t j = 0; j < kSearchedCols; ++j) {
    const int exponent = static_cast<int>(random.below(30)) - 20;
    importance[j] = weighted ? std::ldexp(1.5f + 0.5f * random.symmetric(), exponent) : 1.0f;
    if (weighted && random.below(10) < 3) importance[j] = 1e-6f;
  }
  return importance;
}

void check_same(Digest& digest, const char* what, const std::function<Results(const std::string& isa)>& search) {
  now("scalar", what);
  const Results expected = search("scalar");
  for (const auto& [name, bytes] : expected) digest.add(bytes.data(), bytes.size());
  for (const std::string& isa : quantize::search_isas()) {
    now(isa, what);
    compare(isa, what, search(isa), expected);
  }
}

void check_search(Digest& digest) {
  check_vectors(digest);
  check_scales(digest);
  check_feedback(digest);
  for (const std::string& isa : quantize::search_isas()) std::printf("%-7s searches find the same\n", isa.c_str());
}

}  // namespace fewbits::checks
