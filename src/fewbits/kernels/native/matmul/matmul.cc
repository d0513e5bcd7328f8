// With one row of activations, the packed weights are read and multiplied row by row. With many, a tile of weights is unpacked
// once into a panel that stays in the first-level cache, and multiplied by all of them.
#include "matmul/matmul.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "matmul/activations.h"
#include "matmul/panels.h"
#include "matmul/tiles.h"
#include "matmul/visits.h"

namespace fewbits {
namespace {

// Rows of activations in int8 (activations.h). The arrays are kept between calls: a decode step makes hundreds of calls.
struct Rows {
  size_t blocks = 0;
  std::vector<int8_t> q;
  std::vector<float> scale;
  std::vector<int32_t> sums;  // of 16 columns

  void fill(const Product& product, int threads) {
    const size_t padded = padded_columns(product.cols);
    blocks = padded / 32;
    q.resize(product.rows * padded);
    scale.resize(product.rows * blocks);
    sums.resize(product.rows * blocks * 2);
    QuantizedRows into{product.rows, product.cols, padded, q.data(), scale.data(), sums.data()};
    quantize_rows(product.kernel.isa, product.x, product.rows, product.cols, into, threads);
  }
};

void stream_row(const Product& product, const ActivationRow& x, int threads) {
  const Functions& of = product.kernel.of;
  const Layout& layout = product.kernel.layout;
  stream_fours(
      product, threads, [&](const RowOf* row, float* sum) { of.dot_row(layout, row, x, product.cols, sum); },
      [&](const RowOf* rows, float* sums) { of.dot_four(layout, rows, x, product.cols, sums); });
}

constexpr size_t kPanelBlocks = kPanelColumns / 32;

// Activations in the order in which the micro-kernels read them: panel by panel of columns, tiles of a few rows.
struct Tiles {
  size_t rows = 0, blocks = 0, units = 0, rows_each = 0;
  bool pairs = false;
  std::vector<int8_t> q;
  std::vector<float> scale, sums;
  std::vector<int32_t> zeros;

  size_t rows_of(size_t first) const { return std::min(rows_each, rows - first); }
  size_t blocks_of(size_t block) const { return std::min(kPanelBlocks, blocks - block); }

  // The position of the tile of rows from `first`, in the panel that begins with `block`.
  size_t place(size_t first, size_t block) const { return rows * block + first * blocks_of(block); }

  ActivationTile at(size_t first, size_t block) const {
    const size_t here = place(first, block);
    return {rows_of(first), &q[32 * here], &scale[here], &zeros[units * here], &sums[units * here]};
  }

  void fill(const Rows& from, size_t count, const MicroKernel& micro, const ByteTraits& bytes, int threads) {
    const size_t tiles = (count + micro.rows - 1) / micro.rows;
    rows = count;
    pairs = micro.pairs;
    blocks = from.blocks;
    units = bytes.by_16 ? 2 : 1;
    rows_each = (count + tiles - 1) / tiles;  // as equal as possible
    q.resize(from.q.size());
    scale.resize(from.scale.size());
    sums.resize(units * from.scale.size());
    zeros.resize(units * from.scale.size());
    for_visits((count + rows_each - 1) / rows_each, from.q.size() / 4, threads, [&](size_t tile) {
      const size_t first = tile * rows_each, n = rows_of(first);
      for (size_t block = 0; block < blocks; ++block) {
        const size_t start = block / kPanelBlocks * kPanelBlocks, into = place(first, start) + (block - start) * n;
        for (size_t r = 0; r < n; ++r) take(from, (first + r) * blocks + block, into, n, r, bytes.zero);
      }
    });
  }

 private:
  // `by` times the sums of the first two and of the last two columns of each step, in 16 bits.
  static int32_t pairs_of(const int8_t* q, size_t steps, int by) {
    int first = 0, last = 0;
    for (size_t step = 0; step < steps; ++step, q += 4) {
      first += q[0] + q[1];
      last += q[2] + q[3];
    }
    return static_cast<int32_t>(static_cast<uint32_t>(by * first & 0xffff) | static_cast<uint32_t>(by * last) << 16);
  }

  void take(const Rows& from, size_t block, size_t into, size_t n, size_t r, int zero) {
    for (size_t step = 0; step < 8; ++step) std::memcpy(&q[32 * into + (step * n + r) * 4], &from.q[32 * block + 4 * step], 4);
    scale[into + r] = from.scale[block];
    for (size_t unit = 0; unit < units; ++unit) {
      const int32_t sum = units == 2 ? from.sums[2 * block + unit] : from.sums[2 * block] + from.sums[2 * block + 1];
      zeros[units * into + unit * n + r] =
          pairs ? pairs_of(&from.q[32 * block + 16 * unit], units == 2 ? 4 : 8, -zero) : -zero * sum;
      sums[units * into + unit * n + r] = from.scale[block] * static_cast<float>(sum);
    }
  }
};

// Rows of a panel from tiles: two stripes side by side, or the last one twice.
void fill_from_tiles(const Product& product, const Tiling& tiling, const TileFunctions& tiles, size_t first, size_t block,
                     size_t blocks, Panel& panel) {
  const size_t stripes = tiling.stripes(product.weights);
  for (size_t lane = 0; lane < kPanelRows; lane += kStripe)
    for (size_t b = 0; b < blocks; b += kChunkBlocks) {
      const Place place = tiling.place(std::min((first + lane) / kStripe, stripes - 1), stripes, (block + b) / kChunkBlocks);
      const size_t count = std::min(kChunkBlocks, blocks - b), unit = tiling.units(b);
      const uint8_t* const header = product.tiles + place.header;
      if (tiles.expand_integers)
        tiles.expand_integers(tiling, header, count, panel, unit, lane);
      else
        tiles.expand(tiling, header, count, panel.scale[unit] + lane, panel.offset[unit] + lane, kPanelRows);
      tiles.unpack(tiling, product.tiles + place.codes, place.step, count, lane, panel.bytes + 8 * b);
    }
}

struct ChunkBytes {
  size_t blocks, header, all;

  ChunkBytes(const Tiling& tiling, size_t blocks)
      : blocks(blocks), header(tiling.header_bytes(blocks)), all(tiling.chunk_bytes(blocks)) {}
};

// One row of activations, with four stripes at a time: those abreast, or else four far apart, which are read in as many places at
// once.
void stream_stripes(const Product& product, const ActivationRow& x, int threads) {
  const Tiling tiling(product.kernel, product.cols);
  const TileFunctions of = find_tiles(product.kernel.isa, tiling.bytes);
  const size_t stripes = tiling.stripes(product.weights), stripe_bytes = tiling.stripe_bytes();
  const size_t at_a_time = kStreams * rows_at_a_time(stripes, stripe_bytes, threads);
  // asked once: these sizes take divisions, a fifth of all instructions if they are asked of each chunk
  const ChunkBytes whole(tiling, kChunkBlocks), rest(tiling, tiling.blocks % kChunkBlocks);
  const size_t block_bytes = tiling.block_bytes(), most = tiling.abreast, ahead = most > 1 ? kAhead : kAheadOfEach;
  float* const out = product.out;
  for_visits((stripes + at_a_time - 1) / at_a_time, product.weights * product.cols, threads, [&](size_t visit) {
    StripeSums sums[kStreams];
    const size_t first = visit * at_a_time, end = std::min(first + at_a_time, stripes);
    const size_t turns = (end - first + kStreams - 1) / kStreams, apart = most > 1 ? 1 : turns;
    for (size_t i = 0; i < turns; ++i) {
      const size_t start = first + i * most, abreast = std::min(most, end - start);
      const uint8_t* chunk[kStreams];
      size_t place[kStreams];                  // among those abreast
      for (size_t k = 0; k < kStreams; ++k) {  // if no stripe is left, the last one is read again
        const size_t stripe = std::min(start + k * apart, end - 1);
        place[k] = stripe % most;
        chunk[k] = product.tiles + (stripe - place[k]) * stripe_bytes;
        std::fill_n(sums[k].total, kStripe, 0.0f);
        sums[k].step = abreast * block_bytes;
      }
      for (size_t block = 0; block < tiling.blocks; block += kChunkBlocks) {
        const ChunkBytes& here = tiling.blocks - block >= kChunkBlocks ? whole : rest;
        for (size_t k = 0; k < kStreams; ++k) {
          sums[k].header = chunk[k] + place[k] * here.header;
          sums[k].codes = chunk[k] + abreast * here.header + place[k] * block_bytes;
          chunk[k] += abreast * here.all;
          for (size_t line = 0; line < here.header; line += 64) __builtin_prefetch(sums[k].header + ahead + line);
          if (of.expands) of.expand(tiling, sums[k].header, here.blocks, sums[k].scale[0], sums[k].offset[0], kStripe);
        }
        of.dot(tiling, sums, here.blocks, x, block);
      }
      for (size_t k = 0; k < kStreams && start + k * apart < end; ++k) {
        const size_t row_of = (start + k * apart) * kStripe, count = std::min(kStripe, product.weights - row_of);
        for (size_t w = 0; w < count; ++w)
          out[row_of + w] = product.bias ? sums[k].total[w] + product.bias[row_of + w] : sums[k].total[w];
      }
    }
  });
}

void multiply_panels(const Product& product, const Rows& rows, int threads) {
  thread_local Tiles tiles_of_thread;
  Tiles& tiles = tiles_of_thread;
  const ByteTraits& bytes = product.kernel.of.bytes;
  const TileFunctions tiled = product.tiles ? find_tiles(product.kernel.isa, bytes) : TileFunctions{};
  const MicroKernel micro = find_micro_kernel(product.kernel.isa, bytes, tiled.expand_integers);
  tiles.fill(rows, product.rows, micro, bytes, threads);
  const size_t visits = (product.weights + kPanelRows - 1) / kPanelRows;
  const Tiling tiling(product.kernel, product.cols);
  for_visits(visits, product.rows * product.weights * product.cols, threads, [&](size_t visit) {
    thread_local const std::unique_ptr<Panel> panel = std::make_unique<Panel>();
    thread_local std::vector<float> sums;  // rows of the product are pages apart: they are summed here, and written once
    sums.resize(product.rows * kPanelRows);
    const size_t first = visit * kPanelRows, count = std::min(kPanelRows, product.weights - first);
    std::array<const uint8_t*, kMaxFields> weights[kPanelRows];
    for (size_t i = 0; i < kPanelRows; ++i) weights[i] = product.weight.at(first + std::min(i, count - 1));
    for (size_t block = 0; block < tiles.blocks; block += kPanelBlocks) {
      const size_t blocks = tiles.blocks_of(block);
      if (product.tiles)
        fill_from_tiles(product, tiling, tiled, first, block, blocks, *panel);
      else
        product.kernel.of.fill_panel(product.kernel.layout, weights, 32 * block, 32 * blocks, product.cols, *panel);
      for (size_t row = 0; row < product.rows; row += tiles.rows_each)
        micro.multiply(*panel, bytes, tiles.at(row, block), blocks, block != 0, sums.data() + row * kPanelRows);
    }
    for (size_t row = 0; row < product.rows; ++row) {
      float* const out = product.out + row * product.weights + first;
      const float *sum = sums.data() + row * kPanelRows, *bias = product.bias ? product.bias + first : nullptr;
      for (size_t w = 0; w < count; ++w) out[w] = bias ? sum[w] + bias[w] : sum[w];
    }
  });
}

}  // namespace

void multiply(const Product& product, int threads) {
  if (product.rows > 1) {
    thread_local Rows rows;
    rows.fill(product, threads);
    return multiply_panels(product, rows, threads);
  }
  thread_local QuantizedRow row;
  row.fill(product.kernel.isa, product.x, product.cols);
  multiply_row(product, row, threads);
}

void multiply_row(const Product& product, QuantizedRow& x, int threads) {
  const ActivationRow row = x.with_zero(product.kernel.of.bytes.zero);
  product.tiles ? stream_stripes(product, row, threads) : stream_row(product, row, threads);
}

void QuantizedRow::fill(const char* isa, const float* x, size_t cols) {
  const size_t padded = padded_columns(cols), blocks = padded / 32;
  q_.resize(padded);
  scale_.resize(blocks);
  sums_.resize(2 * blocks);
  find_quantize_row(isa)(x, cols, q_.data(), scale_.data(), sums_.data());
  sum_32_.resize(blocks);
  sum_16_.resize(2 * blocks);
  for (size_t b = 0; b < blocks; ++b) {
    sum_32_[b] = scale_[b] * static_cast<float>(sums_[2 * b] + sums_[2 * b + 1]);
    sum_16_[2 * b] = scale_[b] * static_cast<float>(sums_[2 * b]);
    sum_16_[2 * b + 1] = scale_[b] * static_cast<float>(sums_[2 * b + 1]);
  }
}

ActivationRow QuantizedRow::with_zero(int zero) {
  zeros_.resize(scale_.size());
  zeros_16_.resize(sums_.size());
  for (size_t i = 0; i < sums_.size(); ++i) zeros_16_[i] = -zero * sums_[i];
  for (size_t b = 0; b < zeros_.size(); ++b) zeros_[b] = zeros_16_[2 * b] + zeros_16_[2 * b + 1];
  return {q_.data(), scale_.data(), zeros_.data(), zeros_16_.data(), sum_32_.data(), sum_16_.data()};
}

}  // namespace fewbits
