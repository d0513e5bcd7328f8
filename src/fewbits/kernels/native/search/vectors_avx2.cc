// Codes of vectors for AVX2.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "search/quantize.h"
#include "search/vectors.h"

// The compiler's warnings about passing and returning vectors are about calls that are inlined.
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 warns about the header of its intrinsics
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#define FEWBITS_LANES 8

namespace fewbits::vectors {
namespace {
#include "search/vectors_searches.inc"
}  // namespace

const Searches avx2_searches{kLanes, nearest, fit, visit};

}  // namespace fewbits::vectors
#pragma GCC pop_options
#endif
