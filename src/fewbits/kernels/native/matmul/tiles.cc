#include "matmul/tiles.h"

#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "matmul/tiles_codebook.h"
#include "platform/threads.h"

namespace fewbits {
namespace {

// The bits of a float that is exactly a float16.
bool to_half(float value, uint16_t& half) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), sign = bits >> 16 & 0x8000, exponent = bits >> 23 & 255;
  const uint32_t fraction = bits & 0x7fffff;
  if (exponent == 255)
    half = static_cast<uint16_t>(sign | 0x7c00 | (fraction ? 0x200 : 0));
  else if (exponent > 112)
    half = static_cast<uint16_t>(sign | (exponent - 112) << 10 | fraction >> 13);
  else
    half = static_cast<uint16_t>(sign | static_cast<uint32_t>(std::fabs(value) * 0x1p24f));
  return exponent == 255 || float_of(half) == value;
}

// As kHalves of mxfp4: its scales are powers of two, the two smallest subnormal.
uint8_t exponent_of(float scale) {
  const uint32_t bits = std::bit_cast<uint32_t>(scale);
  if (bits >= 0x7f800000) return 255;
  return static_cast<uint8_t>(bits < 0x00800000 ? bits >> 22 : (bits >> 23) + 1);
}

struct Stripe {
  const Panel& panel;
  size_t lane, block;  // where it begins in the panel
};

Pieces pieces_of_bits(int bits) {
  switch (bits) {
    case 1:
      return pieces_of<1>();
    case 2:
      return pieces_of<2>();
    case 3:
      return pieces_of<3>();
    case 4:
      return pieces_of<4>();
    case 5:
      return pieces_of<5>();
    case 6:
      return pieces_of<6>();
    default:
      return pieces_of<8>();
  }
}

void write_codes(const Tiling& tiling, const uint8_t* code_of, const Stripe& stripe, size_t blocks, uint8_t* into, size_t apart) {
  const Pieces pieces = pieces_of_bits(tiling.bits());
  uint8_t codes[8][64];
  for (size_t b = 0; b < blocks; ++b, into += apart) {
    for (size_t step = 0; step < 8; ++step) {
      const auto* const rows = stripe.panel.bytes[8 * (stripe.block + b) + step] + stripe.lane;
      for (size_t i = 0; i < 64; ++i) codes[step][i] = code_of[rows[i / 4][i % 4]];
    }
    std::memset(into, 0, tiling.block_bytes());
    for (size_t step = 0; step < 8; ++step)
      for (const Piece& piece : pieces[step])
        for (size_t i = 0; i < 64 && piece.count; ++i)
          into[64 * piece.line + i] |=
              static_cast<uint8_t>((codes[step][i] >> piece.to & ((1 << piece.count) - 1)) << piece.from);
  }
}

// Units of [16] integers: as bytes; as the planes of six bits, eight units at a time; or in one nibble of a byte.
uint8_t* write_integers(const Tiling& tiling, const uint8_t (*values)[kStripe], size_t units, uint8_t* into) {
  if (tiling.bytes.scales == Scales::kEightBits) {
    std::memcpy(into, values, units * kStripe);
    return into + units * kStripe;
  }
  for (size_t first = 0; first < units; first += 8, into += 6 * kStripe) {
    std::memset(into, 0, 6 * kStripe);
    for (size_t i = 0; i < 8; ++i)
      for (size_t row = 0; row < kStripe; ++row) {
        const int value = values[first + i][row];
        into[i % 4 * kStripe + row] |= static_cast<uint8_t>((value & 15) << (i / 4 * 4));
        into[(4 + i % 2) * kStripe + row] |= static_cast<uint8_t>((value >> 4 & 3) << (i / 2 * 2));
      }
  }
  return into;
}

void write_nested(const Tiling& tiling, const SubScales* rows, size_t blocks, uint8_t* into) {
  const size_t units = tiling.units(blocks);
  const ByteTraits& bytes = tiling.bytes;
  uint8_t sub[16][kStripe], min[16][kStripe];
  for (size_t row = 0; row < kStripe; ++row) {
    std::memcpy(into + 2 * row, &rows[row].d, 2);
    if (bytes.offsets) std::memcpy(into + 2 * (kStripe + row), &rows[row].dmin, 2);
    for (size_t unit = 0; unit < units; ++unit) {
      sub[unit][row] = static_cast<uint8_t>(rows[row].sub[unit] + bytes.sub_zero);
      min[unit][row] = rows[row].min[unit];
      if (bytes.scales == Scales::kFourBits) sub[unit][row] |= static_cast<uint8_t>(min[unit][row] << 4);
    }
  }
  into += (bytes.offsets ? 4 : 2) * kStripe;
  if (bytes.scales == Scales::kFourBits) {
    std::memcpy(into, sub, units * kStripe);
    return;
  }
  into = write_integers(tiling, sub, units, into);
  if (bytes.offsets) write_integers(tiling, min, units, into);
}

bool write_plain(const Tiling& tiling, const Stripe& stripe, size_t blocks, uint8_t* into) {
  const ByteTraits& bytes = tiling.bytes;
  const size_t runs = tiling.runs(blocks), first = tiling.units(stripe.block);
  const size_t scale_bytes = bytes.scales == Scales::kExponent ? 1 : 2, offset_bytes = bytes.zero_points ? 1 : 2;
  uint8_t* const offsets = into + runs * kStripe * scale_bytes;
  for (size_t i = 0; i < runs; ++i)
    for (size_t row = 0; row < kStripe; ++row) {
      const size_t unit = first + i * tiling.unit_of_run(), at = i * kStripe + row;
      const float scale = stripe.panel.scale[unit][stripe.lane + row];
      uint16_t half = 0;
      if (scale_bytes == 1)
        into[at] = exponent_of(scale);
      else if (!to_half(scale, half))
        return false;
      else
        std::memcpy(into + 2 * at, &half, 2);
      if (!bytes.offsets) continue;
      const float offset = stripe.panel.offset[unit][stripe.lane + row];
      if (offset_bytes == 1) {
        const float zero = scale != 0 && std::isfinite(scale) ? -offset / scale : 0.0f;
        offsets[at] = static_cast<uint8_t>(static_cast<int8_t>(zero));
      } else if (!to_half(offset, half)) {
        return false;
      } else {
        std::memcpy(offsets + 2 * at, &half, 2);
      }
    }
  return true;
}

}  // namespace

Tiling::Tiling(const Kernel& kernel, size_t cols)
    : bytes(kernel.of.bytes),
      blocks((cols + 31) / 32),
      run(kernel.layout.reach > 3 ? kChunk : std::min(kChunk, bytes.run << kernel.layout.reach)),
      abreast(bytes.codebook || std::strcmp(kernel.isa, "avx2") ? 1 : kStreams) {}

Place Tiling::place(size_t stripe, size_t stripes, size_t chunk) const {
  const size_t first = stripe / abreast * abreast, count = std::min(abreast, stripes - first);
  const size_t here = std::min(kChunkBlocks, blocks - chunk * kChunkBlocks), header = header_bytes(here);
  const size_t start = first * stripe_bytes() + count * chunk * chunk_bytes(kChunkBlocks);
  return {start + (stripe - first) * header, start + count * header + (stripe - first) * block_bytes(), count * block_bytes()};
}

size_t Tiling::integer_bytes(size_t blocks) const {
  return units(blocks) * kStripe * (bytes.scales == Scales::kSixBits ? 6 : 8) / 8;
}

size_t Tiling::block_bytes() const {
  if (bytes.codebook) return CodebookTiling(*bytes.codebook, bytes.by_16).block_bytes();
  return kStripe * 32 / 8 * bits();
}

size_t Tiling::header_bytes(size_t blocks) const {
  if (bytes.codebook) return CodebookTiling(*bytes.codebook, bytes.by_16).scales;
  if (nested()) {
    const size_t sets = bytes.offsets && bytes.scales != Scales::kFourBits ? 2 : 1;
    return (bytes.offsets ? 4 : 2) * kStripe + sets * integer_bytes(blocks);
  }
  const size_t offset_bytes = bytes.offsets ? bytes.zero_points ? 1 : 2 : 0;
  return runs(blocks) * kStripe * ((bytes.scales == Scales::kExponent ? 1 : 2) + offset_bytes);
}

size_t Tiling::stripe_bytes() const {
  const size_t rest = blocks % kChunkBlocks;
  return blocks / kChunkBlocks * chunk_bytes(kChunkBlocks) + (rest ? chunk_bytes(rest) : 0);
}

TileFunctions find_tiles([[maybe_unused]] const char* isa, [[maybe_unused]] const ByteTraits& bytes) {
#if defined(__x86_64__)
  if (bytes.codebook && std::strcmp(isa, "scalar")) return find_codebook_tiles(isa, bytes);
  if (!std::strcmp(isa, "avx512")) return tiles_avx512(bytes);
  if (!std::strcmp(isa, "avxvnni")) return tiles_avxvnni(bytes);
  if (!std::strcmp(isa, "avx2")) return tiles_avx2(bytes);
#endif
  return {};
}

size_t tiled_bytes(const Kernel& kernel, size_t weights, size_t cols) {
  const Tiling tiling(kernel, cols);
  return tiling.stripes(weights) * tiling.stripe_bytes();
}

bool tile(const Kernel& kernel, const PackedWeight& weight, size_t weights, size_t cols, uint8_t* into, int threads) {
  const Tiling tiling(kernel, cols);
  if (tiling.bytes.codebook) {
    tile_codebook(kernel, weight, weights, cols, into, threads);
    return true;
  }
  const Kernel* const scalar = find_kernel(kernel.layout.format, "scalar");
  const size_t stripes = tiling.stripes(weights), panels = (weights + kPanelRows - 1) / kPanelRows;
  uint8_t code_of[256];
  // AVX2's panels hold 8-bit codes as signed bytes, and so do its tiles
  const size_t above = !std::strcmp(kernel.isa, "avx2") && tiling.bytes.bits == 8 ? tiling.bytes.zero : 0;
  for (size_t i = 0; i < 256; ++i) code_of[i] = static_cast<uint8_t>(i);
  if (tiling.bytes.levels)
    for (size_t i = 16; i-- > 0;) code_of[(tiling.bytes.levels[i] - above) & 255] = static_cast<uint8_t>(i);
  std::atomic<bool> fits = true;
  std::atomic<size_t> next = 0;
  run_shares(shares_of(threads, panels), [&](size_t) {
    const auto panel = std::make_unique<Panel>();
    std::vector<SubScales> sub(kStripe);
    for (size_t p; (p = next.fetch_add(1, std::memory_order_relaxed)) < panels;) {
      std::array<const uint8_t*, kMaxFields> rows[kPanelRows];
      for (size_t i = 0; i < kPanelRows; ++i) rows[i] = weight.at(std::min(p * kPanelRows + i, weights - 1));
      for (size_t block = 0; block < tiling.blocks; block += kPanelColumns / 32) {
        const size_t blocks = std::min(kPanelColumns / 32, tiling.blocks - block);
        kernel.of.fill_panel(kernel.layout, rows, 32 * block, 32 * blocks, cols, *panel);
        for (size_t lane = 0; lane < kPanelRows && p * kPanelRows + lane < weights; lane += kStripe)
          for (size_t start = 0; start < blocks; start += kChunkBlocks) {
            const size_t count = std::min(kChunkBlocks, blocks - start), chunk = (block + start) / kChunkBlocks;
            const Place place = tiling.place((p * kPanelRows + lane) / kStripe, stripes, chunk);
            uint8_t* const at = into + place.header;
            const Stripe stripe{*panel, lane, start};
            if (tiling.nested()) {
              for (size_t row = 0; row < kStripe; ++row)
                scalar->of.sub_scales(kernel.layout, rows[lane + row].data(), chunk, sub[row]);
              write_nested(tiling, sub.data(), count, at);
            } else if (!write_plain(tiling, stripe, count, at)) {
              fits = false;
            }
            write_codes(tiling, code_of, stripe, count, into + place.codes, place.step);
          }
      }
    }
  });
  return fits;
}

}  // namespace fewbits
