// Tiles of codebook formats: the fields of a super-block as they are stored, 16 rows of them together, so that nothing grows.
//
// A chunk is 256 columns of 16 rows:
//
//     d        [16 rows] float16
//     scales   per 16 columns: [8 blocks][16 rows] a nibble for each half of a block, the first low
//              per 32 columns: [4][16 rows] a nibble for each of two blocks, the even one low; of iq1_s, the shift above the
//              scale
//     blocks   eight of 32 columns
//
// iq2_xxs and iq3_xxs have a bit of the scale beside seven signs instead; iq1_m has its four words [4][16 rows] instead of d and
// scales. A block is
//
//     index    low eight bits, in registers of 64 bytes
//     signs    64 bytes; seven are above a bit of the scale (iq2_xxs, iq3_xxs) or the ninth bit of the index (iq2_xs)
//     high     bits of the index beyond eight, 1 to 3 for each byte of `index`, in its order; of iq1_m the shift is a fourth
//
// A group is 16 columns. Points of eight: a quarter of a register is [group of 2][4 rows][2 points], so that interleaving a
// table's first four coordinates with its last four gives a register for each group, whose lane is a row, and a lane's bytes are
// columns c, c + 8, c + 4, c + 12 for c in 0..3. Points of four are stored in that order: a register for each group, its lane a
// row, bytes the points 0, 2, 1, 3. Signs are like points of eight.
#pragma once

#include "formats/codebook.h"
#include "matmul/tiles.h"

namespace fewbits {

struct CodebookTiling {
  size_t registers;  // of indices, in a block
  size_t signs;      // bytes of a block
  size_t high_bits;  // for each byte of index, stored apart
  size_t scales;     // bytes of a chunk, with d

  CodebookTiling(const Codebook& codebook, bool by_16);

  size_t high_bytes() const { return registers * 8 * high_bits; }
  size_t block_bytes() const { return 64 * registers + signs + high_bytes(); }
};

// Where point `place` of row `row` of a block is, among the bytes of its registers; and where a byte of eight signs is.
constexpr size_t place_of_eight(size_t row, size_t place) { return 16 * (row / 4) + 8 * (place / 2) + 2 * (row % 4) + place % 2; }
constexpr size_t place_of_four(size_t row, size_t place) {
  return 64 * (place / 4) + 4 * row + (place % 4 == 1 || place % 4 == 2 ? 3 - place % 4 : place % 4);
}

// AVX2, and AVX-512 without VBMI, loads points one by one, into registers of four rows by eight columns, a row in each
// 64-bit lane. Its layout has the same fields in the order of these registers. Of four rows of a stripe (`row_of_four`: so that
// two such registers become four columns of eight rows by two shuffles), one four after another in each section of a chunk:
//
//     d        [16 rows] float16, not in iq1_m
//     scales   [2][8 blocks] of two rows, a nibble for each: low of the first two, high of the last two rows. Per 16 columns
//              [2 pairs of rows][2][8 blocks]: low of the first half of a block, high of the last. Of iq1_m the four words of a
//              row
//     signs    per 64 columns [row][column of eight], 8 columns or 7: bit i is of the i-th eight columns
//     high     bits of the index beyond eight, in fields: two bits, or four, or one are taken out of all bytes by one shift
//     index    low eight bits, [64 columns][pair of rows][block][row][eight columns]; of points of four [block][pair of rows]
//              [eight columns][row][point]
struct FoursLayout {
  size_t dims;
  Signs signs;
  bool by_16;
  size_t high_bits;  // for each point; of iq1_m the shift is the highest

  // bytes for four rows, of signs for each 64 columns of them
  constexpr size_t scale_bytes() const { return by_16 ? 32 : 16; }
  constexpr size_t sign_bytes() const { return signs == Signs::kSeven ? 28 : signs == Signs::kEight ? 32 : 0; }
  constexpr size_t high_bytes() const { return 128 / dims * high_bits; }
  constexpr size_t index_bytes() const { return 1024 / dims; }

  constexpr size_t scales_at() const { return signs == Signs::kOfPoint ? 0 : 2 * kStripe; }
  constexpr size_t signs_at() const { return scales_at() + 4 * scale_bytes(); }
  constexpr size_t high_at() const { return signs_at() + 16 * sign_bytes(); }
  constexpr size_t index_at() const { return high_at() + 4 * high_bytes(); }
};

FoursLayout fours_of(const Codebook& codebook, bool by_16);

constexpr size_t row_of_four(size_t four, size_t lane) { return 8 * (four / 2) + 2 * (four % 2) + lane % 2 + 4 * (lane / 2); }

bool lie_in_fours(const char* isa);  // not for AVX-512 with VBMI
TileFunctions find_codebook_tiles(const char* isa, const ByteTraits& bytes);
void tile_codebook(const Kernel& kernel, const PackedWeight& weight, size_t weights, size_t cols, uint8_t* into, int threads);

#if defined(__x86_64__)
bool has_vbmi();
TileFunctions tiles_codebook_avx2(const ByteTraits& bytes);
TileFunctions tiles_codebook_avx512(const ByteTraits& bytes);  // if has_vbmi()
#endif

}  // namespace fewbits
