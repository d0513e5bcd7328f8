// Products for AVX2 and its fused multiply-adds.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "search/product.h"

// The compiler's warnings about passing and returning vectors are about calls that are inlined.
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns about the header of its intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define FEWBITS_LANES 8

namespace fewbits {
namespace {
#include "search/quantize_lanes.inc"
// clang-format off: it needs the one before it
#include "search/product.inc"
// clang-format on
}  // namespace

const Multiply avx2_multiply = multiply;

}  // namespace fewbits
#pragma GCC pop_options
#endif
