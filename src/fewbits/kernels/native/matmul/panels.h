// Rows of activations times a panel of weights: where products of matrices spend their time, whatever the format.
#pragma once

#include "kernels.h"

namespace fewbits {

// A few rows of activations in the order in which a micro-kernel reads them, block by block of 32 columns. A unit is the columns
// under one scale of the weight, 32 or 16.
struct ActivationTile {
  size_t rows;
  const int8_t* q;       // [block][4 columns][row][column]
  const float* scale;    // [block][row]
  const int32_t* zeros;  // [block][unit][row]: -zero * the sum of q; or of its first two columns in four, and of its last two
  const float* sums;     // [block][unit][row]: scale * the sum of q
};

// out (rows, kPanelRows): `add` to it, or overwrite it.
using MultiplyPanel = void (*)(const Panel&, const ByteTraits&, const ActivationTile&, size_t blocks, bool add, float* out);

struct MicroKernel {
  MultiplyPanel multiply;
  size_t rows;         // at most, of a tile
  bool pairs = false;  // the zeros it takes are two numbers of 16 bits
};

// `integers`: the panel has integer scales.
MicroKernel find_micro_kernel(const char* isa, const ByteTraits& bytes, bool integers);
#if defined(__x86_64__)
MicroKernel micro_kernel_avx2(const ByteTraits& bytes, bool integers);
MicroKernel micro_kernel_avxvnni(const ByteTraits& bytes);
MicroKernel micro_kernel_avx512(const ByteTraits& bytes);
#elif defined(__aarch64__)
MicroKernel micro_kernel_neon(const ByteTraits& bytes);
#endif

}  // namespace fewbits
