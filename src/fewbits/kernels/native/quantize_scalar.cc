// The searches in lanes of 128 bits, which the compiler makes of what every processor has.
#include <cmath>
#include <cstring>

#include "quantize.h"

// What the compiler remarks on passing and returning vectors is about calls that do not remain.
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 says it of the header of its own intrinsics
#define FEWBITS_LANES 4

namespace fewbits::quantize {
namespace {
#include "quantize_searches.inc"
}  // namespace

const Searches scalar_searches{scales, lines, sub_scales, sub_lines, exponents, encode};

}  // namespace fewbits::quantize
