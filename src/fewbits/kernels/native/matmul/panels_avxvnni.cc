// panels_vnni.inc with AVX-VNNI: 12 integer sums stay in the 16 registers, float sums are added to in the first-level cache once
// in eight products.
#include "matmul/panels.h"
#include "platform/avxvnni.h"

#if defined(__x86_64__)
namespace fewbits {
namespace {

using namespace avxvnni;

constexpr size_t kMostRows = 6, kMostRowsBy16 = 4;
#define FEWBITS_ISA FEWBITS_AVXVNNI
#include "matmul/panels_vnni.inc"
#undef FEWBITS_ISA

}  // namespace

MicroKernel micro_kernel_avxvnni(const ByteTraits& bytes) { return micro_kernel(bytes); }

}  // namespace fewbits
#endif
