// panels_vnni.inc with AVX-512: 12 integer and 12 float sums stay in registers.
#include "matmul/panels.h"
#include "platform/avx512.h"

#if defined(__x86_64__)
namespace fewbits {
namespace {

using namespace avx512;

constexpr size_t kMostRows = 6, kMostRowsBy16 = 4;  // by 16, two more sets of sums are in registers
#define FEWBITS_ISA FEWBITS_AVX512
#include "matmul/panels_vnni.inc"
#undef FEWBITS_ISA

}  // namespace

MicroKernel micro_kernel_avx512(const ByteTraits& bytes) { return micro_kernel(bytes); }

}  // namespace fewbits
#endif
