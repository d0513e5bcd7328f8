// Products with lanes of 128 bits, in vector types that every compiler can lower to its processor.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "search/product.h"

// The compiler's warnings about passing and returning vectors are about calls that are inlined.
#pragma GCC diagnostic ignored "-Wpsabi"
#define FEWBITS_LANES 4

namespace fewbits {
namespace {
#include "search/quantize_lanes.inc"
// clang-format off: it needs the one before it
#include "search/product.inc"
// clang-format on
}  // namespace

const Multiply scalar_multiply = multiply;

}  // namespace fewbits
