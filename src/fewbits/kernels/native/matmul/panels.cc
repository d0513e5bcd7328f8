// panels.h in plain C++: the other instruction sets must give the same results.
#include "matmul/panels.h"

#include "platform/avx512.h"

namespace fewbits {
namespace {

void multiply(const Panel& panel, const ByteTraits& bytes, const ActivationTile& x, size_t blocks, bool add, float* out) {
  const size_t units = bytes.by_16 ? 2 : 1, columns = 32 / units;
  for (size_t row = 0; row < x.rows; ++row)
    for (size_t w = 0; w < kPanelRows; ++w) {
      float& into = out[row * kPanelRows + w];
      float total = add ? into : 0.0f;
      for (size_t b = 0; b < blocks; ++b) {
        for (size_t unit = 0; unit < units; ++unit) {
          const size_t at = (units * b + unit) * x.rows + row;
          int32_t sum = x.zeros[at];
          for (size_t j = columns * unit; j < columns * (unit + 1); ++j)
            sum += panel.bytes[8 * b + j / 4][w][j % 4] * x.q[((8 * b + j / 4) * x.rows + row) * 4 + j % 4];
          total += static_cast<float>(sum) * panel.scale[units * b + unit][w] * x.scale[b * x.rows + row];
          if (bytes.offsets) total += panel.offset[units * b + unit][w] * x.sums[at];
        }
      }
      into = total;
    }
}

}  // namespace

MicroKernel find_micro_kernel(const char* isa, [[maybe_unused]] const ByteTraits& bytes, [[maybe_unused]] bool integers) {
#if defined(__x86_64__)
  if (!std::strcmp(isa, "avx512")) return micro_kernel_avx512(bytes);
  if (!std::strcmp(isa, "avxvnni")) return micro_kernel_avxvnni(bytes);
  if (!std::strcmp(isa, "avx2")) return micro_kernel_avx2(bytes, integers);
#elif defined(__aarch64__)
  if (!std::strcmp(isa, "neon")) return micro_kernel_neon(bytes);
#endif
  return {multiply, 4};
}

}  // namespace fewbits
