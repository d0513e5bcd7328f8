// A weight in the layout of the registers, made once when a model is loaded. Products with one row of activations then run at the
// memory's speed, whatever the format, and panels are filled without a transposition.
//
// A stripe is 16 rows, the lanes of a register. It is stored in chunks of 256 columns (the last may be shorter), one after
// another:
//
//     scales   [group][16 rows] float16 or exponents; or, if they are integers: d, dmin [16 rows] float16, then the integers
//     offsets  [group][16 rows] float16 or zero points
//     codes    per 32 columns: planes of 4, 2 and 1 bits, or whole bytes
//
// A step is 4 columns of 16 rows: 64 bytes, which one instruction multiplies. A plane of b bits holds the eight steps of 32
// columns in 8 * b bytes of each lane: of 4 bits, step k low and k + 4 high; of 2, steps k, k + 2, k + 4, k + 6; of 1, all.
// Six-bit integers of scales are planes of 4 and 2 bits too. So nothing grows, except scales of rows, which every chunk repeats.
// Formats with a codebook have a layout of their own: tiles_codebook.h.
#pragma once

#include "matmul/matmul.h"

namespace fewbits {

constexpr size_t kStripe = 16, kChunkBlocks = 8, kChunk = 32 * kChunkBlocks;

struct Tiling {
  ByteTraits bytes;
  size_t blocks;  // of 32 columns; the last may be padded
  size_t run;     // columns under one stored scale, at most a chunk

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
  size_t stripes(size_t weights) const { return (weights + kStripe - 1) / kStripe; }
};

// How many bytes ahead to prefetch: the hardware's prefetching stops at the end of each page, and would pause while scales are
// computed.
constexpr size_t kAhead = 2048;

// scale, offset: [unit][stride], of which 16 floats are written.
using ExpandScales = void (*)(const Tiling&, const uint8_t* chunk, size_t blocks, float* scale, float* offset, size_t stride);
// into[step][lane + row][column]: bytes in the order of a panel.
using UnpackSteps = void (*)(const Tiling&, const uint8_t* codes, size_t blocks, size_t lane, uint8_t (*into)[kPanelRows][4]);
// Stripes that are read at the same time, at most: a core reads memory faster in four places than in one.
constexpr size_t kStreams = 4;
struct StripeSums {
  const uint8_t* header;  // of the chunk
  const uint8_t* codes;
  alignas(64) float scale[2 * kChunkBlocks][kStripe];  // as ExpandScales gave them
  alignas(64) float offset[2 * kChunkBlocks][kStripe];
  alignas(64) float total[kStripe];
};
// total += the products of each of the first `streams` with the blocks of x from `first` on.
using DotStripes = void (*)(const Tiling&, StripeSums (&stripes)[kStreams], size_t blocks, const ActivationRow& x, size_t first);

struct TileFunctions {
  ExpandScales expand = nullptr;
  UnpackSteps unpack = nullptr;
  DotStripes dot = nullptr;
  bool expands = true;  // false: `dot` reads the scales from the tiles itself
  size_t streams = kStreams;
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
