// Codes of vectors with lanes of 128 bits, in vector types that every compiler can lower to its processor.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "search/quantize.h"
#include "search/vectors.h"

// The compiler's warnings about passing and returning vectors are about calls that are inlined.
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 warns about the header of its intrinsics
#define FEWBITS_LANES 4

namespace fewbits::vectors {
namespace {
#include "search/vectors_searches.inc"
}  // namespace

const Searches scalar_searches{kLanes, nearest, fit, visit};

}  // namespace fewbits::vectors
