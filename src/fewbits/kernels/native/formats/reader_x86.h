// reader.h for AVX2, AVX-VNNI and AVX-512, which all compile reader_x86.inc.
#pragma once

#include "formats/reader.h"
#include "platform/avx512.h"
#include "platform/avxvnni.h"

#if defined(__x86_64__)
namespace fewbits {

namespace avx2 {
#define FEWBITS_ISA FEWBITS_AVX2
#define FEWBITS_ISA_INLINE FEWBITS_AVX2_INLINE
#define FEWBITS_512 0
#define FEWBITS_VNNI 0
#include "formats/reader_decode_x86.inc"
#include "formats/reader_x86.inc"
#undef FEWBITS_ISA
#undef FEWBITS_ISA_INLINE
#undef FEWBITS_512
#undef FEWBITS_VNNI
}  // namespace avx2

namespace avxvnni {
using avx2::block_at, avx2::decode_row, avx2::signed_bytes;
#define FEWBITS_ISA FEWBITS_AVXVNNI
#define FEWBITS_ISA_INLINE FEWBITS_AVXVNNI_INLINE
#define FEWBITS_VNNI 1
#include "formats/reader_x86.inc"
#undef FEWBITS_ISA
#undef FEWBITS_ISA_INLINE
#undef FEWBITS_VNNI
}  // namespace avxvnni

namespace avx512 {
#define FEWBITS_ISA FEWBITS_AVX512
#define FEWBITS_ISA_INLINE FEWBITS_AVX512_INLINE
#define FEWBITS_512 1
#define FEWBITS_VNNI 1
#include "formats/reader_decode_x86.inc"
#include "formats/reader_x86.inc"
#undef FEWBITS_ISA
#undef FEWBITS_ISA_INLINE
#undef FEWBITS_512
#undef FEWBITS_VNNI
}  // namespace avx512

template <typename Scalar, typename Avx2>
struct Readers<Scalar, Avx2> {
  Kernel scalar, avx2, avxvnni, avx512;

  Readers(const Layout& layout, PackRow pack_row)
      : scalar(layout, "scalar", runs_everywhere, scalar_functions<Scalar>(pack_row)),
        avx2(layout, "avx2", has_avx2, avx2::functions<Avx2>()),
        avxvnni(layout, "avxvnni", has_avxvnni, avxvnni::functions<Avx2>()),
        avx512(layout, "avx512", has_avx512, avx512::functions<Avx2>()) {}
};

}  // namespace fewbits
#endif
