// reader.h for AVX2 and AVX-512, which both compile reader_x86.inc.
#pragma once

#include "formats/reader.h"
#include "platform/avx512.h"

#if defined(__x86_64__)
namespace fewbits {

namespace avx2 {
#define FEWBITS_ISA FEWBITS_AVX2
#define FEWBITS_ISA_INLINE FEWBITS_AVX2_INLINE
#define FEWBITS_VNNI 0
#include "formats/reader_x86.inc"
#undef FEWBITS_ISA
#undef FEWBITS_ISA_INLINE
#undef FEWBITS_VNNI
}  // namespace avx2

namespace avx512 {
#define FEWBITS_ISA FEWBITS_AVX512
#define FEWBITS_ISA_INLINE inline __attribute__((always_inline)) FEWBITS_AVX512
#define FEWBITS_VNNI 1
#include "formats/reader_x86.inc"
#undef FEWBITS_ISA
#undef FEWBITS_ISA_INLINE
#undef FEWBITS_VNNI
}  // namespace avx512

template <typename Scalar, typename Avx2>
struct Readers<Scalar, Avx2> {
  Kernel scalar, avx2, avx512;

  Readers(const Layout& layout, PackRow pack_row)
      : scalar(layout, "scalar", runs_everywhere, scalar_functions<Scalar>(pack_row)),
        avx2(layout, "avx2", has_avx2, avx2::functions<Avx2>()),
        avx512(layout, "avx512", has_avx512, avx512::functions<Avx2>()) {}
};

}  // namespace fewbits
#endif
