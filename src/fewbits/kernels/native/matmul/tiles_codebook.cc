#include "matmul/tiles_codebook.h"

#include <atomic>
#include <vector>

#include "platform/threads.h"

namespace fewbits {
namespace {

void write_bits(uint8_t* at, size_t bit, uint32_t value) {  // that begin with zeros, and may cross into the next byte
  for (; value; value >>= 1, ++bit) at[bit / 8] |= static_cast<uint8_t>((value & 1) << (bit % 8));
}

// A row's scales and d.
void write_header(const Codebook& codebook, bool by_16, const PointCodes& codes, size_t row, uint8_t* into) {
  if (codebook.signs == Signs::kOfPoint) {  // words as they are stored
    for (size_t i = 0; i < 4; ++i) {
      uint32_t word = static_cast<uint32_t>(codes.d >> (4 * i) & 15) << 12;
      for (size_t k = 0; k < 4; ++k) word |= static_cast<uint32_t>(codes.scale[4 * i + k]) << (3 * k);
      const uint16_t stored = static_cast<uint16_t>(word);
      std::memcpy(into + 2 * (kStripe * i + row), &stored, 2);
    }
    return;
  }
  std::memcpy(into + 2 * row, &codes.d, 2);
  if (codebook.signs == Signs::kSeven && !by_16) return;
  for (size_t i = 0; i < (by_16 ? 16 : 8); ++i) {
    const uint32_t shift = codebook.signs == Signs::kOfRun && codes.signs[4 * i] ? 8 : 0;
    into[2 * kStripe + i / 2 * kStripe + row] |= static_cast<uint8_t>((codes.scale[i] | shift) << (i % 2 * 4));
  }
}

// A row's part of the block of 32 columns.
void write_block(const Codebook& codebook, const CodebookTiling& tiling, const PointCodes& codes, size_t block, size_t row,
                 uint8_t* into) {
  const size_t each = 32 / codebook.dims;
  uint8_t* const signs = into + 64 * tiling.registers;
  uint8_t* const high = signs + tiling.signs;
  for (size_t i = 0; i < each; ++i) {
    const size_t place = codebook.dims == 8 ? place_of_eight(row, i) : place_of_four(row, i), point = each * block + i;
    into[place] = static_cast<uint8_t>(codes.index[point]);
    uint32_t above = codes.index[point] >> 8;
    if (codebook.signs == Signs::kOfPoint) above |= codes.signs[point] & 8;
    if (tiling.high_bits) write_bits(high, tiling.high_bits * place, above);
  }
  for (size_t i = 0; i < 4 && tiling.signs; ++i) {
    const uint32_t eight = codes.signs[4 * block + i];
    const bool of_index = codebook.points > 256;
    const uint32_t beside = of_index ? codes.index[4 * block + i] >> 8 : codes.scale[block] >> i & 1;
    signs[place_of_eight(row, i)] = static_cast<uint8_t>(codebook.signs == Signs::kSeven ? eight << 1 | beside : eight);
  }
}

}  // namespace

CodebookTiling::CodebookTiling(const Codebook& codebook, bool by_16)
    : registers(8 / codebook.dims), signs(codebook.shifts() ? 0 : 64), high_bits(0), scales(2 * kStripe) {
  if (codebook.signs != Signs::kSeven)
    for (size_t points = codebook.points; points > 256; points /= 2) ++high_bits;
  if (codebook.signs == Signs::kOfPoint) ++high_bits;
  if (codebook.signs == Signs::kOfPoint)
    scales = 8 * kStripe;
  else if (by_16 || codebook.signs != Signs::kSeven)
    scales += (by_16 ? 8 : 4) * kStripe;
}

void tile_codebook(const Kernel& kernel, const PackedWeight& weight, size_t weights, size_t cols, uint8_t* into, int threads) {
  const ByteTraits& bytes = kernel.of.bytes;
  const CodebookTiling tiling(*bytes.codebook, bytes.by_16);
  const PointCodesAt point_codes = find_kernel(kernel.layout.format, "scalar")->of.point_codes;
  const size_t chunks = cols / kChunk, stripes = (weights + kStripe - 1) / kStripe;
  const size_t chunk_bytes = tiling.scales + kChunkBlocks * tiling.block_bytes();
  std::atomic<size_t> next = 0;
  run_shares(shares_of(threads, stripes), [&](size_t) {
    PointCodes codes;
    for (size_t s; (s = next.fetch_add(1, std::memory_order_relaxed)) < stripes;) {
      uint8_t* const stripe = into + s * chunks * chunk_bytes;
      std::memset(stripe, 0, chunks * chunk_bytes);
      for (size_t row = 0; row < kStripe; ++row) {
        const auto parts = weight.at(std::min(s * kStripe + row, weights - 1));
        for (size_t chunk = 0; chunk < chunks; ++chunk) {
          uint8_t* const at = stripe + chunk * chunk_bytes;
          point_codes(kernel.layout, parts.data(), chunk, codes);
          write_header(*bytes.codebook, bytes.by_16, codes, row, at);
          for (size_t b = 0; b < kChunkBlocks; ++b)
            write_block(*bytes.codebook, tiling, codes, b, row, at + tiling.scales + b * tiling.block_bytes());
        }
      }
    }
  });
}

}  // namespace fewbits
