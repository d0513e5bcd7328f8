// panels.h with NEON: the zero is already subtracted from the weights, which are signed, so x.zeros are not needed.
//
// A tile is 8 weights (two registers of four) by up to 4 rows of activations: 8 sums in integers, 8 in floats, all in the 32
// registers. Two loads of weights and four of activations feed eight products of 16 bytes.
#include "matmul/panels.h"
#include "platform/neon.h"

#if defined(__aarch64__)
namespace fewbits {

namespace neon_dotprod {
#define FEWBITS_ISA FEWBITS_DOTPROD
#include "matmul/panels_neon.inc"
#undef FEWBITS_ISA
}  // namespace neon_dotprod

namespace neon_plain {
#define FEWBITS_ISA
#include "matmul/panels_neon.inc"
#undef FEWBITS_ISA
}  // namespace neon_plain

MicroKernel micro_kernel_neon(const ByteTraits& bytes) {
  return {has_dotprod() ? neon_dotprod::find_multiply(bytes) : neon_plain::find_multiply(bytes), 4};
}

}  // namespace fewbits
#endif
