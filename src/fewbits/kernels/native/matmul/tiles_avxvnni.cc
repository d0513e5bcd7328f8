// tiles_vnni.inc with AVX-VNNI: half of a stripe in a register. Scales are expanded as with AVX2.
#include "matmul/tiles.h"
#include "platform/avxvnni.h"

#if defined(__x86_64__)
namespace fewbits {
namespace {

using namespace avxvnni;

ExpandScales expand_for(const ByteTraits& bytes) { return tiles_avx2(bytes).expand; }

#define FEWBITS_ISA FEWBITS_AVXVNNI
#define FEWBITS_ISA_INLINE FEWBITS_AVXVNNI_INLINE
#include "matmul/tiles_vnni.inc"
#undef FEWBITS_ISA
#undef FEWBITS_ISA_INLINE

}  // namespace

TileFunctions tiles_avxvnni(const ByteTraits& bytes) { return tiles_for(bytes); }

}  // namespace fewbits
#endif
