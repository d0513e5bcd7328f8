// The searches with lanes of 128 bits, in vector types that every compiler can lower to its processor.
#include <cmath>
#include <cstring>

#include "search/quantize.h"

// The compiler's warnings about passing and returning vectors are about calls that are inlined.
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns about the header of its intrinsics
#define FEWBITS_LANES 4

namespace fewbits::quantize {
namespace {
#include "search/quantize_searches.inc"
}  // namespace

const Searches scalar_searches{scales, lines, sub_scales, sub_lines, exponents, encode};

}  // namespace fewbits::quantize
