// A KV cache of float16 for one step of decoding.
//
//     keys    [head][token / 16][channel][token % 16]: sixteen tokens are the lanes of a register, and no sum crosses lanes
//     values  [head][token][channel]
#pragma once

#include <cstddef>
#include <cstdint>

namespace fewbits {

constexpr size_t kKeyTokens = 16;

struct HalfCache {
  size_t heads, width, room;  // room: tokens, a multiple of 16
  uint16_t* keys;             // of one layer
  uint16_t* values;
};

void append_token(const HalfCache& cache, size_t token, const float* keys, const float* values);  // (heads, width) each

// q, out (heads, queries for each, width): softmax(factor * q . keys) . values over the first `tokens` of them.
void attend_halves(const HalfCache& cache, size_t tokens, const float* q, size_t queries, float factor, float* out, int threads);

}  // namespace fewbits
