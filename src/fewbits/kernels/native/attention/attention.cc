// One step of decoding: attention of one query per sequence over a KV cache that stays packed.
//
//     keys     [head][group of 32 tokens][channel / 4][token][4 channels]    8 or 4 bits a code; scale and minimum float16
//     values   [head][token / 4][channel][4 tokens]
//     the rest [head][channel][token] and [head][token][channel], float32: tokens at the start and at the end, not rounded
//
// formats/runtime/kv.py says what is rounded to what, attention.h how 4-bit codes are stored. If the number of channels is no
// multiple of 4, the missing ones have code 0. A key's scale belongs to a channel and a group of tokens (in kv.py `keys` is
// "channel"), or to a token and a group of channels; a value's always to a token and a group of channels.
//
// q . k is the sum over channels of (q * scale) * code + q * minimum: the query, and for values the weights of the softmax, are
// multiplied by the scales, never the codes. So keys and values need only one kind of product: out[j] += a[r] * code[r][j], over
// channels r for 32 tokens j, or over tokens r for channels j. No sum goes across lanes.
//
// Bytes moved: the packed cache, once; with 128 channels 1.1 bytes per value of 8 bits, 0.6 per value of 4. Query heads that
// share keys and values are computed together, four at a time. If each has its own keys, memory is the limit; if four share them,
// the products and preparing the queries are, which happens for every group of keys because each has its own scales.
//
// Work is split into chunks of 512 tokens of a head, each with its own softmax. They are combined in order, by their maxima, so
// that the result does not depend on the threads.
#include "attention/attention.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <initializer_list>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "platform/threads.h"

namespace nb = nanobind;

namespace fewbits {
namespace {

constexpr size_t kGroup = 32;         // tokens whose keys are stored together; kernels/attention.py has the same number
constexpr size_t kChunk = 512;        // tokens of one softmax: whole groups
constexpr size_t kValueTokens = 128;  // whose values are read together: all their channels stay in the first-level cache

const AttentionIsa* const kIsas[] = {
#if defined(__x86_64__)
    &kAttentionAvx512,
    &kAttentionAvx2,
#endif
    &kAttentionScalar,
};

// Scales of one head, and minima or, without them, the level of code 0.
struct Scales {
  const uint8_t *scale, *minimum;
  float first_level;

  // Float16 at entries [from, from + n), as floats.
  void widen(const AttentionIsa& isa, size_t from, size_t n, float* scales, float* minima) const {
    isa.widen(scale + 2 * from, n, scales);
    if (minimum) return isa.widen(minimum + 2 * from, n, minima);
    for (size_t i = 0; i < n; ++i) minima[i] = scales[i] * first_level;
  }
};

struct Cache {
  size_t heads, width, run;  // heads of all sequences; channels of a head; channels under one scale of a token
  size_t tokens, room;       // packed tokens, and tokens that there is space for, in whole groups
  size_t rest, rest_room;    // the same for unrounded tokens
  int bits;
  bool channel_keys;
  Scales key, value;  // (heads, room / 32, width) or (heads, runs, room); (heads, runs, room)
  const uint8_t *key_codes, *value_codes;
  const float *rest_keys, *rest_values;

  size_t runs() const { return (width + run - 1) / run; }
  size_t fours() const { return (width + kRowsTogether - 1) / kRowsTogether; }  // of channels
  size_t key_stride() const { return kRowsTogether * kGroup * bits / 8; }       // bytes from four rows of codes to the next
  size_t value_stride() const { return kRowsTogether * ((width * bits + 7) / 8); }
  size_t chunks() const { return (tokens + kChunk - 1) / kChunk; }
  size_t parts() const { return chunks() + (rest > 0); }  // of a head's work
};

// The state of one thread, for one head of the cache at a time and all query heads that read it.
class Reader {
 public:
  Reader(const AttentionIsa& isa, const Cache& cache, size_t count)
      : isa_(isa),
        cache_(cache),
        count_(count),
        scores_(count * kChunk),
        by_(count * std::max(cache.width, kChunk)),
        scales_(std::max(cache.width, kChunk)),
        minima_(scales_.size()) {}

  // queries (count, width), divided by the root of the width -> for each the largest score, the sum of exp(score - largest), and
  // the values weighted by those (count, width)
  void read(size_t head, size_t part, const float* queries, float* largest, float* sum, float* values) {
    head_ = head;
    queries_ = queries;
    part < cache_.chunks() ? read_packed(part * kChunk, largest, sum, values) : read_rest(largest, sum, values);
  }

 private:
  void read_packed(size_t from, float* largest, float* sum, float* values) {
    const size_t n = std::min(kChunk, cache_.tokens - from);
    for (size_t token = 0; token < n; token += kGroup)
      cache_.channel_keys ? score_by_channel(from + token, token) : score_by_token(from + token, token);
    soften(n, largest, sum);
    for (size_t run = 0; run < cache_.runs(); ++run) weigh(run, from, n, values);
  }

  void read_rest(float* largest, float* sum, float* values) {
    const size_t width = cache_.width, room = cache_.rest_room, n = cache_.rest;
    const float* const keys = cache_.rest_keys + head_ * width * room;
    const float* const rest = cache_.rest_values + head_ * width * room;
    std::fill(scores_.begin(), scores_.end(), 0.0f);
    accumulate_floats(keys, room, width, n, queries_, width, scores_.data(), kChunk);
    soften(n, largest, sum);
    std::fill_n(values, count_ * width, 0.0f);
    accumulate_floats(rest, width, n, width, scores_.data(), kChunk, values, width);
  }

  // Scores of a group of tokens, if scales of keys belong to channels.
  void score_by_channel(size_t token, size_t at) {
    const size_t width = cache_.width, group = head_ * (cache_.room / kGroup) + token / kGroup;
    cache_.key.widen(isa_, group * width, width, scales_.data(), minima_.data());
    for (size_t i = 0; i < count_; ++i) {
      float* const scaled = by_.data() + i * width;
      const float offset = isa_.scale_and_dot(queries_ + i * width, scales_.data(), minima_.data(), width, scaled);
      std::fill_n(scores_.data() + i * kChunk + at, kGroup, offset);
    }
    accumulate(keys_of(group, 0, width), by_.data(), width, scores_.data() + at, kChunk);
  }

  // The same if they belong to tokens, perhaps with several groups of channels.
  void score_by_token(size_t token, size_t at) {
    const size_t width = cache_.width, group = head_ * (cache_.room / kGroup) + token / kGroup;
    for (size_t i = 0; i < count_; ++i) std::fill_n(scores_.data() + i * kChunk + at, kGroup, 0.0f);
    for (size_t run = 0; run < cache_.runs(); ++run) {
      const size_t first = run * cache_.run, n = std::min(cache_.run, width - first);
      cache_.key.widen(isa_, (head_ * cache_.runs() + run) * cache_.room + token, kGroup, scales_.data(), minima_.data());
      std::fill_n(by_.data(), count_ * kGroup, 0.0f);
      accumulate(keys_of(group, first, n), queries_ + first, width, by_.data(), kGroup);
      for (size_t i = 0; i < count_; ++i) {
        const float sum = std::accumulate(queries_ + i * width + first, queries_ + i * width + first + n, 0.0f);
        float* const score = scores_.data() + i * kChunk + at;
        for (size_t t = 0; t < kGroup; ++t) score[t] += scales_[t] * by_[i * kGroup + t] + minima_[t] * sum;
      }
    }
  }

  // Scores to weights, not yet divided by their sum.
  void soften(size_t n, float* largest, float* sum) {
    for (size_t i = 0; i < count_; ++i) sum[i] = isa_.exponentials(scores_.data() + i * kChunk, n, largest[i]);
  }

  // The values of one group of channels.
  void weigh(size_t run, size_t from, size_t n, float* values) {
    const size_t width = cache_.width, first = run * cache_.run, channels = std::min(cache_.run, width - first);
    cache_.value.widen(isa_, (head_ * cache_.runs() + run) * cache_.room + from, n, scales_.data(), minima_.data());
    for (size_t i = 0; i < count_; ++i) {
      const float* const weights = scores_.data() + i * kChunk;
      const float offset = isa_.scale_and_dot(weights, scales_.data(), minima_.data(), n, by_.data() + i * kChunk);
      std::fill_n(values + i * width + first, channels, offset);
    }
    const size_t stride = cache_.value_stride(), at = (head_ * cache_.room + from) / kRowsTogether;
    const uint8_t* const codes = cache_.value_codes + at * stride + kRowsTogether * first * cache_.bits / 8;
    for (size_t token = 0; token < n; token += kValueTokens) {
      const size_t rows = std::min(kValueTokens, n - token);
      accumulate({codes + token / kRowsTogether * stride, cache_.bits, stride, rows, channels}, by_.data() + token, kChunk,
                 values + first, width);
    }
  }

  Codes keys_of(size_t group, size_t channel, size_t channels) const {
    const size_t stride = cache_.key_stride(), at = group * cache_.fours() + channel / kRowsTogether;
    return {cache_.key_codes + at * stride, cache_.bits, stride, channels, kGroup};
  }

  void accumulate(const Codes& codes, const float* a, size_t a_stride, float* out, size_t out_stride) const {
    for (size_t row = 0; row < codes.rows; row += kMostRows) {
      const uint8_t* const start = codes.start + row / kRowsTogether * codes.stride;
      const Codes some{start, codes.bits, codes.stride, std::min(kMostRows, codes.rows - row), codes.cols};
      for (size_t i = 0; i < count_; i += kMostQueries) isa_.accumulate(some, factors(i, a + row, a_stride, out, out_stride));
    }
  }

  void accumulate_floats(const float* values, size_t stride, size_t rows, size_t cols, const float* a, size_t a_stride,
                         float* out, size_t out_stride) const {
    for (size_t i = 0; i < count_; i += kMostQueries)
      isa_.accumulate_floats(values, stride, rows, cols, factors(i, a, a_stride, out, out_stride));
  }

  Factors factors(size_t i, const float* a, size_t a_stride, float* out, size_t out_stride) const {
    return {a + i * a_stride, a_stride, std::min(kMostQueries, count_ - i), out + i * out_stride, out_stride};
  }

  const AttentionIsa& isa_;
  const Cache& cache_;
  const size_t count_;
  size_t head_ = 0;
  const float* queries_ = nullptr;
  std::vector<float> scores_, by_, scales_, minima_;
};

// Combines the parts of a head: each is weighted by how far its largest score is below the largest of all.
void combine(const float* largest, const float* sum, const float* values, size_t parts, size_t count, size_t width, float* out) {
  for (size_t i = 0; i < count; ++i, out += width) {
    float most = largest[i], total = 0;
    for (size_t part = 1; part < parts; ++part) most = std::max(most, largest[part * count + i]);
    std::fill_n(out, width, 0.0f);
    for (size_t part = 0; part < parts; ++part) {
      const float weight = std::exp(largest[part * count + i] - most);
      const float* const from = values + (part * count + i) * width;
      total += weight * sum[part * count + i];
      for (size_t c = 0; c < width; ++c) out[c] += weight * from[c];
    }
    for (size_t c = 0; c < width; ++c) out[c] /= total;
  }
}

void attend_all(const AttentionIsa& isa, const Cache& cache, const float* q, size_t count, float factor, float* out,
                int threads) {
  constexpr size_t kWorthAShare = 1 << 15;  // codes: about 5 us
  const size_t parts = cache.parts(), per_head = count * cache.width, tasks = cache.heads * parts;
  std::vector<float> queries(q, q + cache.heads * per_head);
  for (float& x : queries) x *= factor;
  std::vector<float> largest(tasks * count), sum(tasks * count), values(tasks * per_head);
  std::vector<std::atomic<size_t>> missing(cache.heads);  // parts of each head: the thread that does the last one combines them
  for (auto& m : missing) m = parts;
  std::atomic<size_t> next = 0;
  const size_t shares =
      shares_of(threads, std::min(tasks, cache.heads * cache.width * (cache.tokens + cache.rest) / kWorthAShare));
  run_shares(shares, [&](size_t) {
    Reader reader(isa, cache, count);
    for (size_t task; (task = next++) < tasks;) {
      const size_t head = task / parts, first = head * parts;
      reader.read(head, task % parts, queries.data() + head * per_head, &largest[task * count], &sum[task * count],
                  &values[task * per_head]);
      if (--missing[head] == 0)
        combine(&largest[first * count], &sum[first * count], &values[first * per_head], parts, count, cache.width,
                out + head * per_head);
    }
  });
}

template <typename T, int Dimensions>
using Array = nb::ndarray<const T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;
using Halves = Array<int16_t, 3>;  // float16 bits

void must(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("the cache's arrays do not belong together: ") + what);
}

template <typename Given>
bool is(const Given& array, std::initializer_list<size_t> shape) {
  return std::equal(shape.begin(), shape.end(), array.shape_ptr(),
                    [](size_t a, int64_t b) { return static_cast<int64_t>(a) == b; });
}

// q and out (heads of the cache, query heads for each, width). The others as the head of this file says.
void attend(const std::string& name, const Array<float, 3>& q, int bits, bool channel_keys, size_t run, size_t tokens,
            size_t rest, float first_level, const Array<uint8_t, 5>& key_codes, const Halves& key_scale,
            const std::optional<Halves>& key_minimum, const Array<uint8_t, 4>& value_codes, const Halves& value_scale,
            const std::optional<Halves>& value_minimum, const Array<float, 3>& rest_keys, const Array<float, 3>& rest_values,
            float factor, nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu> out, int threads) {
  const auto isa = std::find_if(std::begin(kIsas), std::end(kIsas), [&](auto* i) { return i->name == name && i->runs_here(); });
  if (isa == std::end(kIsas)) throw std::invalid_argument("no " + name + " kernel reads a packed cache here");
  const size_t heads = q.shape(0), count = q.shape(1), width = q.shape(2);
  const size_t groups = key_codes.shape(1), room = groups * kGroup, rest_room = rest_values.shape(1);
  must(bits == 4 || bits == 8, "codes have 4 or 8 bits");
  must(heads && count && width && is(out, {heads, count, width}), "a result for each query");
  must(run && (run % kRowsTogether == 0 || run >= width), "a run is a multiple of four channels");
  must(tokens <= room && rest <= rest_room && rest <= kChunk && tokens + rest > 0, "tokens that are there");
  const Cache cache{heads,
                    width,
                    std::min(run, width),
                    tokens,
                    room,
                    rest,
                    rest_room,
                    bits,
                    channel_keys,
                    {reinterpret_cast<const uint8_t*>(key_scale.data()),
                     key_minimum ? reinterpret_cast<const uint8_t*>(key_minimum->data()) : nullptr, first_level},
                    {reinterpret_cast<const uint8_t*>(value_scale.data()),
                     value_minimum ? reinterpret_cast<const uint8_t*>(value_minimum->data()) : nullptr, first_level},
                    key_codes.data(),
                    value_codes.data(),
                    rest_keys.data(),
                    rest_values.data()};
  must(is(key_codes, {heads, groups, cache.fours(), cache.key_stride() / kRowsTogether, kRowsTogether}), "codes of keys");
  must(is(value_codes, {heads, room / kRowsTogether, cache.value_stride() / kRowsTogether, kRowsTogether}), "codes of values");
  const auto belongs_to_keys = [&](const Halves& entries) {
    return channel_keys ? is(entries, {heads, groups, width}) : is(entries, {heads, cache.runs(), room});
  };
  must(belongs_to_keys(key_scale) && (!key_minimum || belongs_to_keys(*key_minimum)), "scales of keys");
  must(is(value_scale, {heads, cache.runs(), room}) && (!value_minimum || is(*value_minimum, {heads, cache.runs(), room})),
       "scales of values");
  must(is(rest_keys, {heads, width, rest_room}) && is(rest_values, {heads, rest_room, width}), "tokens in float");
  const float* const from = q.data();
  float* const into = out.data();
  nb::gil_scoped_release released;
  attend_all(**isa, cache, from, count, factor, into, threads);
}

std::vector<std::string> attention_isas() {  // those that run here, fastest first
  std::vector<std::string> names;
  for (const AttentionIsa* isa : kIsas)
    if (isa->runs_here()) names.emplace_back(isa->name);
  return names;
}

}  // namespace

void register_attention(nb::module_& m) {
  m.def("attention_isas", &attention_isas);
  m.def("attend", &attend, nb::arg("isa"), nb::arg("q").noconvert(), nb::arg("bits"), nb::arg("channel_keys"), nb::arg("run"),
        nb::arg("tokens"), nb::arg("rest"), nb::arg("first_level"), nb::arg("key_codes").noconvert(),
        nb::arg("key_scale").noconvert(), nb::arg("key_minimum").noconvert().none(), nb::arg("value_codes").noconvert(),
        nb::arg("value_scale").noconvert(), nb::arg("value_minimum").noconvert().none(), nb::arg("rest_keys").noconvert(),
        nb::arg("rest_values").noconvert(), nb::arg("factor"), nb::arg("out").noconvert(), nb::arg("threads"));
}

}  // namespace fewbits
