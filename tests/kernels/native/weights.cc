#include "weights.h"

#include <cmath>
#include <memory>

#include "formats/codebook.h"

namespace fewbits::checks {
namespace {

constexpr float kLargest = 0x1p40f;

void draw_block(Weight& weight, size_t row, size_t block, Random& random) {
  const size_t blocks = weight.cols / weight.layout->block;
  for (size_t i = 0; i < weight.parts.size(); ++i) {
    const Field& field = weight.layout->parts[i];
    uint8_t* const at = weight.parts[i].data() + row * field.row_bytes(blocks);
    random.fill(at + block * field.per_block, field.per_block);
    random.fill(at + blocks * field.per_block, field.per_row);
  }
}

const Kernel& scalar_of(const Layout& layout) { return *find_kernel(layout.format, "scalar"); }

bool starts_with(const char* text, const char* start) { return !std::strncmp(text, start, std::strlen(start)); }

// One entry of a grid, of a usual size. What it is follows from its name and from the bytes it has.
void draw_grid(const Layout& layout, const Field& field, size_t bytes, size_t codes, Random& random, uint8_t* into) {
  const std::string name = field.name;
  const bool by_one = field.per_block == 1 || field.per_row == 1;
  if (name == "sub" || name == "sub_min") {
    for (size_t i = 0; i < bytes; ++i) into[i] = static_cast<uint8_t>(random.below(16));
  } else if (name == "zeros") {
    for (size_t i = 0; i < bytes; ++i) into[i] = static_cast<uint8_t>(random.below(codes));
  } else if (name == "scales" && by_one) {  // powers of two
    for (size_t i = 0; i < bytes; ++i) into[i] = static_cast<uint8_t>(117 + random.below(10));
  } else if (name == "scales" && layout.block == 64 && field.per_block == 4) {  // e4m3
    for (size_t i = 0; i < bytes; ++i) into[i] = static_cast<uint8_t>(8 + random.below(48));
  } else if (field.per_row == 4) {
    for (size_t i = 0; i < bytes; i += 4) {
      const float scale = 0.25f + random.symmetric() * 0.2f;
      std::memcpy(into + i, &scale, 4);
    }
  } else {  // float16 of 2^-8 to 1, either sign
    for (size_t i = 0; i < bytes; i += 2) {
      const uint16_t half = static_cast<uint16_t>((7 + random.below(8)) << 10 | random.below(1024) | random.below(2) << 15);
      std::memcpy(into + i, &half, 2);
    }
  }
}

}  // namespace

Weight::Weight(const Layout& layout, size_t rows, size_t cols) : layout(&layout), rows(rows), cols(cols) {
  for (const Field& field : layout.parts)
    if (field.name) parts.emplace_back(rows * field.row_bytes(cols / layout.block));
}

PackedWeight Weight::packed() const {
  PackedWeight packed;
  for (size_t i = 0; i < parts.size(); ++i) {
    packed.start[i] = parts[i].data();
    packed.stride[i] = layout->parts[i].row_bytes(cols / layout->block);
  }
  return packed;
}

void give_grids() {
  constexpr int8_t kThree[8] = {8, 25, 43}, kEight[8] = {4, 12, 20, 28, 36, 44, 52, 62}, kOdd[8] = {1, 3, 5, 7, 9, 11, 13, 15};
  for (const Kernel* kernel = first_kernel(); kernel; kernel = kernel->next) {
    Codebook* const codebook = find_codebook(kernel->layout.format);
    if (!codebook) continue;
    Random random(codebook->points + codebook->dims);
    std::vector<int8_t> coordinates(codebook->points * codebook->dims);
    for (int8_t& coordinate : coordinates)
      coordinate = codebook->shifts()    ? static_cast<int8_t>(random.below(3) - 1)
                   : codebook->dims == 8 ? kThree[random.below(3)]
                                         : (codebook->zero == 64 ? kEight : kOdd)[random.below(8)];
    codebook->give(coordinates.data());
  }
}

Weight any_bytes(const Layout& layout, size_t rows, size_t cols, uint64_t seed) {
  Random random(seed);
  Weight weight(layout, rows, cols);
  for (auto& part : weight.parts) random.fill(part.data(), part.size());
  return weight;
}

Weight any_numbers(const Layout& layout, size_t rows, size_t cols, uint64_t seed) {
  Weight weight = any_bytes(layout, rows, cols, seed);
  Random random(seed + 1);
  std::vector<float> w(cols);
  for (size_t row = 0; row < rows; ++row) {
    for (bool again = true; again;) {
      scalar_of(layout).of.decode_row(layout, weight.row(row).data(), cols, w.data(), false);
      again = false;
      for (size_t j = 0; j < cols; ++j)
        if (!(std::abs(w[j]) <= kLargest)) {
          again = true;
          draw_block(weight, row, j / layout.block, random);
          j = j / layout.block * layout.block + layout.block - 1;  // on to the next block
        }
    }
  }
  return weight;
}

size_t count_codes(const Kernel& scalar) {
  const char* const format = scalar.layout.format;
  if (starts_with(format, "iq4") || starts_with(format, "mxfp4") || starts_with(format, "nvfp4")) return 16;
  if (starts_with(format, "tq")) return 3;
  if (scalar.of.bytes.doubled) return 2;
  return scalar.of.bytes.bits ? size_t{1} << scalar.of.bytes.bits : 256;
}

Weight packed_codes(const Layout& layout, size_t rows, size_t cols, uint64_t seed, const std::vector<uint8_t>& codes) {
  Random random(seed);
  Weight weight(layout, rows, cols);
  const Kernel& packer = *find_packer(layout.format);
  const size_t blocks = cols / layout.block;
  for (size_t row = 0; row < rows; ++row) {
    std::vector<std::vector<uint8_t>> grid;
    for (const Field& field : layout.grid) {
      if (!field.name) continue;
      grid.emplace_back(field.row_bytes(blocks));
      draw_grid(layout, field, grid.back().size(), count_codes(scalar_of(layout)), random, grid.back().data());
    }
    const uint8_t* from[kMaxFields] = {};
    uint8_t* into[kMaxFields] = {};
    for (size_t i = 0; i < grid.size(); ++i) from[i] = grid[i].data();
    for (size_t i = 0; i < weight.parts.size(); ++i) into[i] = weight.parts[i].data() + row * layout.parts[i].row_bytes(blocks);
    packer.of.pack_row(layout, codes.data() + row * cols, from, cols, into);
  }
  return weight;
}

std::vector<float> decode(const Kernel& kernel, const Weight& weight, bool past) {
  std::vector<float> w;
  for (size_t row = 0; row < weight.rows; ++row) {
    Guarded<float> out(past ? (weight.cols + 15) / 16 * 16 : weight.cols);  // aligned to 64 bytes, as it must be then
    kernel.of.decode_row(*weight.layout, weight.row(row).data(), weight.cols, out.data(), past);
    w.insert(w.end(), out.data(), out.data() + weight.cols);
  }
  return w;
}

Values values_of(const Kernel& scalar, const Weight& weight) {
  const ByteTraits& traits = scalar.of.bytes;
  const size_t unit = traits.by_16 ? 16 : 32, padded = (weight.cols + 31) / 32 * 32;
  const auto panel = std::make_unique<Panel>();
  Values values;
  for (size_t row = 0; row < weight.rows; ++row) {
    std::array<const uint8_t*, kMaxFields> rows[kPanelRows];
    std::fill_n(rows, kPanelRows, weight.row(row));
    for (size_t first = 0; first < padded; first += kPanelColumns) {
      const size_t columns = std::min(kPanelColumns, padded - first);
      scalar.of.fill_panel(*weight.layout, rows, first, columns, weight.cols, *panel);
      for (size_t j = 0; j < std::min(columns, weight.cols - first); ++j) {
        const int byte = panel->bytes[j / 4][row % kPanelRows][j % 4];
        const float scale = panel->scale[j / unit][row % kPanelRows];
        const float offset = traits.offsets ? panel->offset[j / unit][row % kPanelRows] : 0.0f;
        const float product = scale * static_cast<float>(byte - traits.zero);
        values.byte.push_back(byte);
        values.w.push_back(static_cast<double>(scale) * (byte - traits.zero) + offset);
        values.size.push_back(std::abs(static_cast<double>(scale)) * (byte + traits.zero) + std::abs(offset));
        values.rounded.push_back(traits.offsets ? product + offset : product);
      }
    }
  }
  return values;
}

std::vector<size_t> widths_of(const Layout& layout) {
  const size_t block = layout.block;
  if (block >= 32) return {block, 3 * block, (1100 + block - 1) / block * block};
  return {block, 31 * block, 64, 1096 + block};  // 1096: a multiple of every such block, and 64 of them ends with whole ones
}

}  // namespace fewbits::checks
