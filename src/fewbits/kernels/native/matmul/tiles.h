// A weight in the layout of the registers, made once when a model is loaded. Products with one row of activations then run at the
// memory's speed, whatever the format, and panels are filled without a transposition.
//
// A stripe is 16 rows, the lanes of a register. It is stored in chunks of 256 columns (the last may be shorter), one after
// another:
//
//     scales   [group][16 rows] float16 or exponents; or, if they are integers: d, dmin [16 rows] float16, then the integers
//     offsets  [group][16 rows] float16 or zero points
//     codes    per 32 columns, in lines of 64 bytes: as many as a code has bits
//
// A step is 4 columns of 16 rows: 64 bytes, which one instruction multiplies. The codes of the eight steps of 32 columns are cut
// into pieces, so that most are one shift and one mask away (Piece, below). Six-bit integers of scales are planes of 4 and 2
// bits. So nothing grows, except scales of rows, which every chunk repeats. Formats with a codebook have a layout of their own:
// tiles_codebook.h.
//
// AVX2 has four stripes abreast: chunk by chunk the headers of all, then block by block the codes of all. They share what is made
// of x, and still a core reads memory in one place, from front to back. Reading two or four places in turn by the same
// instructions may take twice as long: the processor's prefetching follows the strides of an instruction. VNNI keeps the sums of
// four stripes in registers, and so has an instruction for each: there four places are faster than one.
#pragma once

#include "matmul/matmul.h"

namespace fewbits {

constexpr size_t kStripe = 16, kChunkBlocks = 8, kChunk = 32 * kChunkBlocks;
constexpr size_t kStreams = 4;  // stripes that are multiplied at the same time

// Bits from `from` on of a line's bytes, `count` of them, are bits of the code from `to` on.
struct Piece {
  int line = 0, from = 0, count = 0, to = 0;
};
using Pieces = std::array<std::array<Piece, 3>, 8>;  // of each step; those without bits are not used

// Codes of 3, 5 and 6 bits lie whole in the low bits of a byte, as often as they fit; what is left over at the top of the bytes
// makes up the other steps.
template <int kBits>
constexpr Pieces pieces_of() {
  if constexpr (kBits == 3)
    return {{{{{0, 0, 3, 0}}},
             {{{1, 0, 3, 0}}},
             {{{2, 0, 3, 0}}},
             {{{0, 3, 3, 0}}},
             {{{1, 3, 3, 0}}},
             {{{2, 3, 3, 0}}},
             {{{0, 6, 2, 1}, {2, 6, 1, 0}}},
             {{{1, 6, 2, 1}, {2, 7, 1, 0}}}}};
  if constexpr (kBits == 5)
    return {{{{{0, 0, 5, 0}}},
             {{{1, 0, 5, 0}}},
             {{{2, 0, 5, 0}}},
             {{{3, 0, 5, 0}}},
             {{{4, 0, 5, 0}}},
             {{{0, 5, 3, 2}, {1, 5, 2, 0}}},
             {{{2, 5, 3, 2}, {3, 5, 2, 0}}},
             {{{4, 5, 3, 2}, {1, 7, 1, 1}, {3, 7, 1, 0}}}}};
  if constexpr (kBits == 6)
    return {{{{{0, 0, 6, 0}}},
             {{{1, 0, 6, 0}}},
             {{{2, 0, 6, 0}}},
             {{{0, 6, 2, 4}, {1, 6, 2, 2}, {2, 6, 2, 0}}},
             {{{3, 0, 6, 0}}},
             {{{4, 0, 6, 0}}},
             {{{5, 0, 6, 0}}},
             {{{3, 6, 2, 4}, {4, 6, 2, 2}, {5, 6, 2, 0}}}}};
  Pieces pieces{};
  for (int step = 0; step < 8; ++step) pieces[step][0] = {step % kBits, step / kBits * kBits, kBits, kBits == 1 ? 1 : 0};
  return pieces;  // of one bit: bytes of 0 and 2
}

// A chunk of a stripe: where its header and its codes lie, and how far apart the codes of its blocks are.
struct Place {
  size_t header, codes, step;
};

struct Tiling {
  ByteTraits bytes;
  size_t blocks;   // of 32 columns; the last may be padded
  size_t run;      // columns under one stored scale, at most a chunk
  size_t abreast;  // stripes: kStreams or 1

  Tiling(const Kernel& kernel, size_t cols);

  int bits() const { return bytes.levels ? 4 : bytes.doubled ? 1 : bytes.bits; }
  size_t units(size_t blocks) const { return bytes.by_16 ? 2 * blocks : blocks; }
  size_t runs(size_t blocks) const { return (32 * blocks + run - 1) / run; }
  size_t unit_of_run() const { return run / (bytes.by_16 ? 16 : 32); }
  bool nested() const { return bytes.scales > Scales::kExponent; }

  size_t integer_bytes(size_t blocks) const;  // of nested scales, or of their minima
  size_t header_bytes(size_t blocks) const;
  size_t block_bytes() const;
  size_t chunk_bytes(size_t blocks) const { return header_bytes(blocks) + blocks * block_bytes(); }
  size_t stripe_bytes() const;
  Place place(size_t stripe, size_t stripes, size_t chunk) const;
  size_t stripes(size_t weights) const { return (weights + kStripe - 1) / kStripe; }
};

// How many bytes ahead to prefetch: the hardware's prefetching stops at the end of each page, and would pause while scales are
// computed. The second is for stripes that are read in four places.
constexpr size_t kAhead = 8192, kAheadOfEach = kAhead / kStreams;

// scale, offset: [unit][stride], of which 16 floats are written.
using ExpandScales = void (*)(const Tiling&, const uint8_t* chunk, size_t blocks, float* scale, float* offset, size_t stride);
// The panel's integer scales, from `unit` and `lane` on.
using ExpandIntegers = void (*)(const Tiling&, const uint8_t* chunk, size_t blocks, Panel& panel, size_t unit, size_t lane);
// into[step][lane + row][column]: bytes in the order of a panel.
using UnpackSteps = void (*)(const Tiling&, const uint8_t* codes, size_t step, size_t blocks, size_t lane,
                             uint8_t (*into)[kPanelRows][4]);
struct StripeSums {
  const uint8_t* header;  // of the chunk
  const uint8_t* codes;
  size_t step;                                         // bytes from the codes of a block to those of the next
  alignas(64) float scale[2 * kChunkBlocks][kStripe];  // as ExpandScales gave them
  alignas(64) float offset[2 * kChunkBlocks][kStripe];
  alignas(64) float total[kStripe];
};
// total += the products of each with the blocks of x from `first` on.
using DotStripes = void (*)(const Tiling&, StripeSums (&stripes)[kStreams], size_t blocks, const ActivationRow& x, size_t first);

struct TileFunctions {
  ExpandScales expand = nullptr;
  UnpackSteps unpack = nullptr;
  DotStripes dot = nullptr;
  bool expands = true;                       // false: `dot` reads the scales from the tiles itself
  ExpandIntegers expand_integers = nullptr;  // if panels are multiplied by integer scales
};

// All null if this instruction set has no kernels for tiles: weights are then read in their stored layout.
TileFunctions find_tiles(const char* isa, const ByteTraits& bytes);
#if defined(__x86_64__)
TileFunctions tiles_avx2(const ByteTraits& bytes);
TileFunctions tiles_avxvnni(const ByteTraits& bytes);
TileFunctions tiles_avx512(const ByteTraits& bytes);
#endif

size_t tiled_bytes(const Kernel& kernel, size_t weights, size_t cols);
// False: a scale is no float16, so that tiles cannot hold it.
bool tile(const Kernel& kernel, const PackedWeight& weight, size_t weights, size_t cols, uint8_t* into, int threads);

}  // namespace fewbits
