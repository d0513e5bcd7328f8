// libFuzzer's entry: any bytes as a packed weight of any format, in memory that ends where it must not be left. Every instruction
// set must decode them to the bits of the scalar reader, and read, multiply and fill panels without a fault.
//
// input: byte 0 the format, byte 1 the width in blocks, byte 2 the rows; then the parts, row after row, repeated where too short.
#include <array>
#include <bit>
#include <cmath>
#include <memory>

#include "weights.h"

namespace {

using namespace fewbits;
using namespace fewbits::checks;

std::vector<const Kernel*> scalar_kernels() {
  std::vector<const Kernel*> found;
  for (const Kernel* kernel = first_kernel(); kernel; kernel = kernel->next)
    if (!std::strcmp(kernel->isa, "scalar")) found.push_back(kernel);
  return found;
}

void fill(Weight& weight, const uint8_t* data, size_t size) {
  size_t at = 0;
  for (auto& part : weight.parts)
    for (size_t i = 0; i < part.size(); ++i) part[i] = size ? data[at++ % size] : 0;
}

void check_decoded(const Kernel& kernel, const Kernel& scalar, const Weight& weight) {
  const std::vector<float> w = decode(kernel, weight, false), expected = decode(scalar, weight, false);
  for (size_t i = 0; i < w.size(); ++i)
    if (std::bit_cast<uint32_t>(w[i]) != std::bit_cast<uint32_t>(expected[i]) && !(std::isnan(w[i]) && std::isnan(expected[i])))
      __builtin_trap();
}

void multiply(const Kernel& kernel, const Weight& weight) {
  if (!kernel.of.dot_row) return;
  const size_t cols = weight.cols, padded = (cols + 31) / 32 * 32;
  Guarded<int8_t> q(padded);
  Guarded<float> scale(padded / 32), sum_32(padded / 32), sum_16(padded / 16);
  Guarded<int32_t> zeros(padded / 32), zeros_16(padded / 16);
  for (size_t i = 0; i < padded; ++i) q[i] = i < cols ? static_cast<int8_t>(i * 37) : 0;
  for (size_t i = 0; i < padded / 32; ++i) scale[i] = 1.0f, sum_32[i] = 0.5f, zeros[i] = 3;
  for (size_t i = 0; i < padded / 16; ++i) sum_16[i] = 0.25f, zeros_16[i] = 1;
  const ActivationRow x{q.data(), scale.data(), zeros.data(), zeros_16.data(), sum_32.data(), sum_16.data()};
  const auto row = weight.row(0);
  const RowOf rows[4] = {row.data(), row.data(), row.data(), row.data()};
  float out[4];
  kernel.of.dot_row(*weight.layout, rows, x, cols, out);
  if (kernel.of.dot_four) kernel.of.dot_four(*weight.layout, rows, x, cols, out);
}

void fill_panels(const Kernel& kernel, const Weight& weight) {
  if (!kernel.of.fill_panel) return;
  static const auto panel = std::make_unique<Panel>();
  std::array<const uint8_t*, kMaxFields> rows[kPanelRows];
  for (size_t i = 0; i < kPanelRows; ++i) rows[i] = weight.row(i % weight.rows);
  const size_t padded = (weight.cols + 31) / 32 * 32;
  for (size_t first = 0; first < padded; first += kPanelColumns)
    kernel.of.fill_panel(*weight.layout, rows, first, std::min(kPanelColumns, padded - first), weight.cols, *panel);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::vector<const Kernel*> known = scalar_kernels();
  if (size < 3) return 0;
  const Kernel& scalar = *known[data[0] % known.size()];
  const Layout& layout = scalar.layout;
  const size_t widest = 2048 / layout.block + 1;
  Weight weight(layout, 1 + data[2] % 3, layout.block * (1 + data[1] % widest));
  fill(weight, data + 3, size - 3);
  for (const Kernel* kernel = first_kernel(); kernel; kernel = kernel->next) {
    if (std::strcmp(kernel->layout.format, layout.format) || !kernel->runs_here()) continue;
    check_decoded(*kernel, scalar, weight);
    multiply(*kernel, weight);
    fill_panels(*kernel, weight);
  }
  return 0;
}
