// The peak rates of this machine, for `fewbits bench`: bytes read per second, 8-bit and float multiplications per second.
// Peaks run in registers alone, with enough independent sums to hide the latency of an instruction (4 or 5 cycles, two of them
// started in each). They are peaks of these instructions: a kernel for 4 bits may add several products in 16 bits before it
// widens them, and so exceed the peak of AVX2. On processors other than x86-64 only reading is measured.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "platform/avxvnni.h"
#include "platform/threads.h"

namespace nb = nanobind;

namespace fewbits {
namespace {

using ByteList = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Four streams at once: where this was measured, a core read 12 GB/s with one stream, 14.5 with one and prefetching, 16.5 with
// four and prefetching, and no more with more streams.
constexpr size_t kStreams = 4, kStep = 256;

size_t stream_bytes(size_t count) { return count / kStreams / kStep * kStep; }

// The exclusive or of everything, so that the compiler cannot skip a read.
uint64_t read_anywhere(const uint8_t* at, size_t count) {
  const size_t bytes = stream_bytes(count);
  uint64_t sum[kStreams] = {};
  for (size_t i = 0; i < bytes; i += kStep)
    for (size_t stream = 0; stream < kStreams; ++stream)
      for (size_t k = 0; k < kStep; k += 8) sum[stream] ^= load<uint64_t>(at + stream * bytes + i + k);
  return sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
}

#if defined(__x86_64__)

#define FEWBITS_FMA __attribute__((target("avx2,fma")))
#define FEWBITS_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

constexpr size_t kAhead = 1024;  // bytes: the hardware's prefetching stops at the end of each page

bool has_fma() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"); }
bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"); }

template <typename Vector, size_t kCount>
inline __attribute__((always_inline)) uint64_t exclusive_or(const Vector (&sum)[kCount]) {
  uint64_t words[kCount * sizeof(Vector) / 8], found = 0;
  std::memcpy(words, sum, sizeof words);
  for (const uint64_t word : words) found ^= word;
  return found;
}

FEWBITS_FMA uint64_t read_avx2(const uint8_t* at, size_t count) {
  const size_t bytes = stream_bytes(count);
  __m256i sum[4] = {};
  for (size_t i = 0; i < bytes; i += kStep)
    for (size_t stream = 0; stream < kStreams; ++stream)
#pragma GCC unroll 8
      for (size_t k = 0; k < kStep / 32; ++k) {
        const uint8_t* const here = at + stream * bytes + i + 32 * k;
        if (k % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(here + kAhead), _MM_HINT_T0);
        sum[k % 4] = _mm256_xor_si256(sum[k % 4], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(here)));
      }
  return exclusive_or(sum);
}

FEWBITS_VNNI uint64_t read_avx512(const uint8_t* at, size_t count) {
  const size_t bytes = stream_bytes(count);
  __m512i sum[4] = {};
  for (size_t i = 0; i < bytes; i += kStep)
    for (size_t stream = 0; stream < kStreams; ++stream)
#pragma GCC unroll 4
      for (size_t k = 0; k < kStep / 64; ++k) {
        const uint8_t* const here = at + stream * bytes + i + 64 * k;
        _mm_prefetch(reinterpret_cast<const char*>(here + kAhead), _MM_HINT_T0);
        sum[k] = _mm512_xor_si512(sum[k], _mm512_loadu_si512(here));
      }
  return exclusive_or(sum);
}

// Makes the compiler take the value for a new one each time; otherwise it would multiply once and not in every round.
#define FEWBITS_ANEW(value) asm volatile("" : "+v"(value))

// The sum of all, as words: a test knows what it must be, and so that every round was done.
template <typename Vector, size_t kSums>
inline __attribute__((always_inline)) uint64_t any_word(const Vector (&sum)[kSums]) {
  uint64_t words[kSums * sizeof(Vector) / 8], found = 0;
  std::memcpy(words, sum, sizeof words);
  for (const uint64_t word : words) found += word;
  return found;
}

// 32 products and their sums by twos and fours: three instructions.
FEWBITS_FMA uint64_t int8_avx2(size_t rounds) {
  __m256i sum[8] = {}, x = _mm256_set1_epi8(3), w = _mm256_set1_epi8(-5);
  const __m256i ones = _mm256_set1_epi16(1);
  for (size_t round = 0; round < rounds; ++round)
#pragma GCC unroll 32
    for (__m256i& own : sum) {
      FEWBITS_ANEW(w);
      own = _mm256_add_epi32(own, _mm256_madd_epi16(_mm256_maddubs_epi16(x, w), ones));
    }
  return any_word(sum);
}

FEWBITS_AVXVNNI uint64_t int8_avxvnni(size_t rounds) {
  __m256i sum[12] = {}, x = _mm256_set1_epi8(3), w = _mm256_set1_epi8(-5);
  for (size_t round = 0; round < rounds; ++round)
#pragma GCC unroll 32
    for (__m256i& own : sum) {
      FEWBITS_ANEW(w);
      own = avxvnni::dpbusd(own, x, w);
    }
  return any_word(sum);
}

FEWBITS_VNNI uint64_t int8_vnni(size_t rounds) {
  __m512i sum[16] = {}, x = _mm512_set1_epi8(3), w = _mm512_set1_epi8(-5);
  for (size_t round = 0; round < rounds; ++round)
#pragma GCC unroll 32
    for (__m512i& own : sum) {
      FEWBITS_ANEW(w);
      own = _mm512_dpbusd_epi32(own, x, w);
    }
  return any_word(sum);
}

FEWBITS_FMA uint64_t float_avx2(size_t rounds) {
  __m256 sum[12] = {}, x = _mm256_set1_ps(0.5f), w = _mm256_set1_ps(0.25f);
  for (size_t round = 0; round < rounds; ++round)
#pragma GCC unroll 32
    for (__m256& own : sum) {
      FEWBITS_ANEW(w);
      own = _mm256_fmadd_ps(x, w, own);
    }
  return any_word(sum);
}

FEWBITS_VNNI uint64_t float_avx512(size_t rounds) {
  __m512 sum[16] = {}, x = _mm512_set1_ps(0.5f), w = _mm512_set1_ps(0.25f);
  for (size_t round = 0; round < rounds; ++round)
#pragma GCC unroll 32
    for (__m512& own : sum) {
      FEWBITS_ANEW(w);
      own = _mm512_fmadd_ps(x, w, own);
    }
  return any_word(sum);
}

#endif

struct Reader {
  const char* isa;
  bool (*runs_here)();
  uint64_t (*read)(const uint8_t* at, size_t count);
};

struct Peak {
  const char* unit;  // "int8", "fp32"
  const char* isa;
  bool (*runs_here)();
  double operations;  // in a round: a multiplication and an addition are two
  uint64_t (*run)(size_t rounds);
};

constexpr Reader kReaders[] = {
#if defined(__x86_64__)
    {"avx512", has_vnni, read_avx512},
    {"avx2", has_fma, read_avx2},
#endif
    {"any", runs_everywhere, read_anywhere},
};

const std::vector<Peak> kPeaks = {
#if defined(__x86_64__)
    {"int8", "avx512-vnni", has_vnni, 16 * 64 * 2.0, int8_vnni}, {"int8", "avx-vnni", has_avxvnni, 12 * 32 * 2.0, int8_avxvnni},
    {"int8", "avx2", has_fma, 8 * 32 * 2.0, int8_avx2},          {"fp32", "avx512", has_vnni, 16 * 16 * 2.0, float_avx512},
    {"fp32", "avx2", has_fma, 12 * 8 * 2.0, float_avx2},
#endif
};

std::vector<std::string> readers() {  // those that run here
  std::vector<std::string> found;
  for (const Reader& reader : kReaders)
    if (reader.runs_here()) found.emplace_back(reader.isa);
  return found;
}

std::vector<std::tuple<std::string, std::string, double>> peaks() {  // (unit, isa, operations in a round) of those that run here
  std::vector<std::tuple<std::string, std::string, double>> found;
  for (const Peak& peak : kPeaks)
    if (peak.runs_here()) found.emplace_back(peak.unit, peak.isa, peak.operations);
  return found;
}

// Reads every byte, except fewer than kStreams * kStep at the end of each thread's share, and returns their exclusive or.
uint64_t read_all(const std::string& isa, const ByteList& bytes, int threads) {
  const Reader* chosen = nullptr;
  for (const Reader& reader : kReaders)
    if (isa == reader.isa && reader.runs_here()) chosen = &reader;
  if (!chosen) throw std::invalid_argument("no " + isa + " reader runs here");
  const uint8_t* const from = bytes.data();
  const size_t count = bytes.shape(0), shares = shares_of(threads, count / 4096);
  nb::gil_scoped_release released;
  std::atomic<uint64_t> found{0};
  run_shares(shares, [&](size_t i) {
    const size_t first = count * i / shares, last = count * (i + 1) / shares;
    found ^= chosen->read(from + first, last - first);
  });
  return found;
}

// The same number of rounds on every thread; the operations done by all are peaks()' operations * rounds * threads.
uint64_t run_peak(const std::string& unit, const std::string& isa, size_t rounds, int threads) {
  const Peak* chosen = nullptr;
  for (const Peak& peak : kPeaks)
    if (unit == peak.unit && isa == peak.isa && peak.runs_here()) chosen = &peak;
  if (!chosen) throw std::invalid_argument("no " + unit + " peak of " + isa + " runs here");
  const size_t shares = shares_of(threads, static_cast<size_t>(threads < 1 ? 1 : threads));
  nb::gil_scoped_release released;
  std::atomic<uint64_t> found{0};
  run_shares(shares, [&](size_t) { found += chosen->run(rounds); });
  return found;
}

}  // namespace

void register_roofline(nb::module_& m) {
  m.def("roofline_readers", &readers);
  m.def("roofline_peaks", &peaks);
  m.def("roofline_read", &read_all, nb::arg("isa"), nb::arg("bytes").noconvert(), nb::arg("threads"));
  m.def("roofline_peak", &run_peak, nb::arg("unit"), nb::arg("isa"), nb::arg("rounds"), nb::arg("threads"));
}

}  // namespace fewbits
