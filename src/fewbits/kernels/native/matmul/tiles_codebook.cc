#include "matmul/tiles_codebook.h"

#include <atomic>
#include <vector>

#include "platform/threads.h"

namespace fewbits {
namespace {

void write_bits(uint8_t* at, size_t bit, uint32_t value) {  // that begin with zeros, and may cross into the next byte
  for (; value; value >>= 1, ++bit) at[bit / 8] |= static_cast<uint8_t>((value & 1) << (bit % 8));
}

// One of the four words of iq1_m, as it is stored.
void write_word(const PointCodes& codes, size_t i, uint8_t* into) {
  uint32_t word = static_cast<uint32_t>(codes.d >> (4 * i) & 15) << 12;
  for (size_t k = 0; k < 4; ++k) word |= static_cast<uint32_t>(codes.scale[4 * i + k]) << (3 * k);
  const uint16_t stored = static_cast<uint16_t>(word);
  std::memcpy(into, &stored, 2);
}

// A row's scales and d.
void write_header(const Codebook& codebook, bool by_16, const PointCodes& codes, size_t row, uint8_t* into) {
  if (codebook.signs == Signs::kOfPoint) {  // words as they are stored
    for (size_t i = 0; i < 4; ++i) write_word(codes, i, into + 2 * (kStripe * i + row));
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

// A row's scales and d, for AVX2. Nibbles of a byte are of rows two lanes apart, or of the halves of a block.
void write_scales_of_four(const FoursLayout& layout, const PointCodes& codes, size_t four, size_t lane, uint8_t* chunk) {
  uint8_t* const into = chunk + layout.scales_at() + four * layout.scale_bytes();
  if (layout.signs == Signs::kOfPoint) {  // words as they are stored
    for (size_t i = 0; i < 4; ++i) write_word(codes, i, into + 8 * lane + 2 * i);
    return;
  }
  std::memcpy(chunk + 2 * row_of_four(four, lane), &codes.d, 2);
  for (size_t b = 0; b < kChunkBlocks; ++b) {
    uint8_t* const at = into + lane % 2 * 8 + b;
    const uint32_t shift = layout.signs == Signs::kOfRun && codes.signs[4 * b] ? 8 : 0;
    if (layout.by_16)
      at[lane / 2 * 16] = static_cast<uint8_t>(codes.scale[2 * b] | codes.scale[2 * b + 1] << 4);
    else
      *at |= static_cast<uint8_t>((codes.scale[b] | shift) << (lane / 2 * 4));
  }
}

// The bits of a point beyond eight: at `place` of the 32 of their set, which are looked up together.
void write_high(const FoursLayout& layout, size_t set, size_t place, uint32_t above, uint8_t* into) {
  const size_t bits = layout.high_bits;
  if (bits >= 2) {
    const size_t field = bits == 3 ? 2 : bits, each = 8 / field;
    into[set / each * 32 + place] |= static_cast<uint8_t>((above & ((1u << field) - 1)) << (set % each * field));
    if (bits != 3) return;
    into += 32;
    above >>= 2;
  }
  if (layout.dims == 4)
    into[place] |= static_cast<uint8_t>(above << set);
  else
    into[place % 16] |= static_cast<uint8_t>(above << (2 * set + place / 16));
}

// A row of a chunk, for AVX2.
void write_row_of_four(const Codebook& codebook, const FoursLayout& layout, const PointCodes& codes, size_t four, size_t lane,
                       uint8_t* chunk) {
  write_scales_of_four(layout, codes, four, lane, chunk);
  uint8_t* const signs = chunk + layout.signs_at() + 4 * four * layout.sign_bytes();
  uint8_t* const high = chunk + layout.high_at() + four * layout.high_bytes();
  uint8_t* const index = chunk + layout.index_at() + four * layout.index_bytes();
  const size_t each = 32 / layout.dims, columns = layout.sign_bytes() / 4;
  for (size_t point = 0; point < 256 / layout.dims; ++point) {
    const size_t block = point / each, eight = point % each / (8 / layout.dims);
    const size_t set = layout.dims == 8 ? block / 2 : block;
    const size_t place =
        lane / 2 * 16 + (layout.dims == 8 ? block % 2 * 8 + lane % 2 * 4 + eight : eight * 4 + lane % 2 * 2 + point % 2);
    index[32 * set + place] = static_cast<uint8_t>(codes.index[point]);
    uint32_t above = codes.index[point] >> 8;
    if (codebook.signs == Signs::kOfPoint) above |= codes.signs[point] & 8;
    if (layout.high_bits) write_high(layout, set, place, above, high);
  }
  for (size_t eight = 0; eight < 32; ++eight)
    for (size_t c = 0; c < columns; ++c)
      signs[eight / 8 * layout.sign_bytes() + lane * columns + c] |=
          static_cast<uint8_t>((codes.signs[eight] >> c & 1) << (eight % 8));
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

FoursLayout fours_of(const Codebook& codebook, bool by_16) {
  FoursLayout layout{codebook.dims, codebook.signs, by_16, codebook.signs == Signs::kOfPoint ? size_t{1} : size_t{0}};
  for (size_t points = codebook.points; points > 256; points /= 2) ++layout.high_bits;
  return layout;
}

bool lie_in_fours([[maybe_unused]] const char* isa) {
#if defined(__x86_64__)
  return std::strcmp(isa, "avx512") || !has_vbmi();
#else
  return true;
#endif
}

TileFunctions find_codebook_tiles([[maybe_unused]] const char* isa, [[maybe_unused]] const ByteTraits& bytes) {
#if defined(__x86_64__)
  return lie_in_fours(isa) ? tiles_codebook_avx2(bytes) : tiles_codebook_avx512(bytes);
#else
  return {};
#endif
}

void tile_codebook(const Kernel& kernel, const PackedWeight& weight, size_t weights, size_t cols, uint8_t* into, int threads) {
  const ByteTraits& bytes = kernel.of.bytes;
  const CodebookTiling tiling(*bytes.codebook, bytes.by_16);
  const PointCodesAt point_codes = find_kernel(kernel.layout.format, "scalar")->of.point_codes;
  const size_t chunks = cols / kChunk, stripes = (weights + kStripe - 1) / kStripe;
  const size_t chunk_bytes = tiling.scales + kChunkBlocks * tiling.block_bytes();
  const FoursLayout fours = fours_of(*bytes.codebook, bytes.by_16);
  const bool in_fours = lie_in_fours(kernel.isa);
  std::atomic<size_t> next = 0;
  run_shares(shares_of(threads, stripes), [&](size_t) {
    PointCodes codes;
    for (size_t s; (s = next.fetch_add(1, std::memory_order_relaxed)) < stripes;) {
      uint8_t* const stripe = into + s * chunks * chunk_bytes;
      std::memset(stripe, 0, chunks * chunk_bytes);
      for (size_t i = 0; i < kStripe; ++i) {
        const size_t row = in_fours ? row_of_four(i / 4, i % 4) : i;
        const auto parts = weight.at(std::min(s * kStripe + row, weights - 1));
        for (size_t chunk = 0; chunk < chunks; ++chunk) {
          uint8_t* const at = stripe + chunk * chunk_bytes;
          point_codes(kernel.layout, parts.data(), chunk, codes);
          if (in_fours) {
            write_row_of_four(*bytes.codebook, fours, codes, i / 4, i % 4, at);
            continue;
          }
          write_header(*bytes.codebook, bytes.by_16, codes, row, at);
          for (size_t b = 0; b < kChunkBlocks; ++b)
            write_block(*bytes.codebook, tiling, codes, b, row, at + tiling.scales + b * tiling.block_bytes());
        }
      }
    }
  });
}

}  // namespace fewbits
