// Packing gives back its codes; every instruction set decodes to the bits of the scalar kernel, and that to what its bytes say.
#include <cmath>
#include <map>

#include "weights.h"

namespace fewbits::checks {
namespace {

std::vector<uint8_t> random_codes(size_t count, size_t codes, uint64_t seed) {
  Random random(seed);
  std::vector<uint8_t> drawn(count);
  for (uint8_t& code : drawn) code = static_cast<uint8_t>(random.below(codes));
  return drawn;
}

// Each code is one byte of the reader's, and each byte one code; -0, which is a code of its own in some formats, shares that of
// 0.
void check_codes(const Kernel& scalar, const Weight& weight, const std::vector<uint8_t>& codes) {
  const Values values = values_of(scalar, weight);
  std::map<int, int> byte_of, code_of;
  for (size_t i = 0; i < codes.size(); ++i) {
    if (byte_of.try_emplace(codes[i], values.byte[i]).first->second != values.byte[i])
      fail("%s: code %d is packed in two ways", weight.layout->format, codes[i]);
    const int other = code_of.try_emplace(values.byte[i], codes[i]).first->second;
    if (other != codes[i] && (other | codes[i]) != 8)
      fail("%s: codes %d and %d are packed alike", weight.layout->format, other, codes[i]);
  }
}

}  // namespace

void check_packing(Digest& digest) {
  for (const Kernel* scalar = first_kernel(); scalar; scalar = scalar->next) {
    if (std::strcmp(scalar->isa, "scalar") || !scalar->of.pack_row) continue;
    const Layout& layout = scalar->layout;
    for (const size_t cols : widths_of(layout)) {
      const std::vector<uint8_t> codes = random_codes(3 * cols, count_codes(*scalar), cols);
      const Weight weight = packed_codes(layout, 3, cols, cols, codes);
      for (const auto& part : weight.parts) digest.add(part.data(), part.size());
      if (scalar->of.fill_panel) check_codes(*scalar, weight, codes);
    }
  }
}

void check_decoding(const std::string& isa, Digest& digest) {
  size_t formats = 0;
  for (const Kernel* kernel = first_kernel(); kernel; kernel = kernel->next) {
    if (kernel->isa != isa) continue;
    ++formats;
    now(isa, kernel->layout.format);
    const Layout& layout = kernel->layout;
    const Kernel& scalar = *find_kernel(layout.format, "scalar");
    for (const size_t cols : widths_of(layout))
      for (uint64_t seed = 0; seed < 6; ++seed) {
        const Weight weight = (seed % 2 ? any_bytes : any_numbers)(layout, 3, cols, seed);
        const std::vector<float> w = decode(*kernel, weight, seed >= 4), expected = decode(scalar, weight, false);
        for (size_t i = 0; i < w.size(); ++i) {
          if (std::isnan(w[i]) && std::isnan(expected[i])) continue;  // which NaN is the processor's choice
          if (std::bit_cast<uint32_t>(w[i]) != std::bit_cast<uint32_t>(expected[i]))
            fail("%s %s: column %zu of %zu decodes to %a, not %a", isa.c_str(), layout.format, i % cols, cols,
                 static_cast<double>(w[i]), static_cast<double>(expected[i]));
        }
        if (isa != "scalar" || seed % 2) continue;
        digest.add(w.data(), w.size() * sizeof(float));
        if (!scalar.of.fill_panel) continue;
        const Values values = values_of(scalar, weight);
        for (size_t i = 0; i < w.size(); ++i)
          if (w[i] != values.rounded[i])
            fail("%s: column %zu of %zu decodes to %a, but its byte says %a", layout.format, i % cols, cols,
                 static_cast<double>(w[i]), static_cast<double>(values.rounded[i]));
      }
  }
  std::printf("%-7s %3zu formats decode\n", isa.c_str(), formats);
}

}  // namespace fewbits::checks
