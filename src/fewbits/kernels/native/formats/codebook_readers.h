// Registers a codebook format, for the instruction sets of this processor.
#pragma once

#include "formats/codebook_neon.h"
#include "formats/codebook_x86.h"

namespace fewbits {

#if defined(__x86_64__)
template <typename Format>
using CodebookReaders = Readers<CodebookScalar<Format>, CodebookAvx2<Format>>;
#elif defined(__aarch64__)
template <typename Format>
using CodebookReaders = Readers<CodebookScalar<Format>, CodebookNeon<Format>>;
#else
template <typename Format>
using CodebookReaders = Readers<CodebookScalar<Format>>;
#endif

}  // namespace fewbits
