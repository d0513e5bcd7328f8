// tiles_codebook.h with VBMI: a permutation of bytes looks 64 points up in 128 entries of a table, so that points cost two
// instructions for each 128 of them and each 64 points, and never a load for each point.
//
// A table has a byte for each point: the codes of half its coordinates. An entry becomes a byte of the weight with its sign by
// one more permutation, of 64 levels.
#include <algorithm>
#include <bit>

#include "matmul/tiles_codebook.h"
#include "platform/avx512.h"

#if defined(__x86_64__)
namespace fewbits {
namespace {

#define FEWBITS_VBMI __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,fma,f16c")))
#define FEWBITS_VBMI_INLINE inline __attribute__((always_inline)) FEWBITS_VBMI

template <size_t kDimsOf, size_t kPointsOf, Signs kSignsOf, bool kBy16Of>
struct Kind {
  static constexpr size_t kDims = kDimsOf, kTables = kPointsOf / 128, kRegisters = 8 / kDims;
  static constexpr Signs kSigns = kSignsOf;
  static constexpr bool kBy16 = kBy16Of, kShifts = kSigns >= Signs::kOfRun;
  static constexpr bool kScaleBesideSigns = kSigns == Signs::kSeven && !kBy16;
  static constexpr int kCodeBits = kDims == 8 ? 2 : 3;
  static constexpr size_t kHigh = kSigns == Signs::kSeven     ? 0
                                  : kSigns == Signs::kOfPoint ? 4
                                                              : static_cast<size_t>(std::bit_width(kPointsOf)) - 9;
  static constexpr size_t kSignBytes = kShifts ? 0 : 64;
  static constexpr size_t kBlockBytes = 64 * kRegisters + kSignBytes + 8 * kRegisters * kHigh;
  // the tables of few points stay in registers; larger ones are read for all streams at once
  static constexpr size_t kTogether = kTables <= 4 ? 1 : kStreams;
};

// 32 columns of 16 rows, before and after points are looked up.
template <typename Of>
struct Points {
  __m512i index[Of::kRegisters], key[Of::kRegisters];  // key: which 128 entries of a table
  __m512i sign[2];                                     // of each group
};
struct Entries {
  __m512i of[2][2];  // [group][half of the coordinates], if points have four; of eight, [group][0] has all
};

FEWBITS_VBMI_INLINE __m512i load_64(const void* at) { return _mm512_loadu_si512(at); }

// Fields of kBits in 64-bit lanes, one for each byte, moved to bit 1.
template <int kBits>
FEWBITS_VBMI_INLINE __m512i fields(__m512i lanes_u64x8) {
  constexpr auto kFrom = [](int i) { return static_cast<uint64_t>((kBits * i - 1) & 63) << (8 * i); };
  constexpr uint64_t kAll = kFrom(0) | kFrom(1) | kFrom(2) | kFrom(3) | kFrom(4) | kFrom(5) | kFrom(6) | kFrom(7);
  return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(static_cast<int64_t>(kAll)), lanes_u64x8);
}

// Bits of the index above the eighth, from bit 1 of each byte; of iq1_m the shift above them.
template <typename Of>
FEWBITS_VBMI_INLINE __m512i bits_above(const uint8_t* high, size_t i, __m512i signs_u8x64) {
  if constexpr (Of::kSigns == Signs::kSeven) return _mm512_slli_epi16(signs_u8x64, 1);
  if constexpr (Of::kHigh == 1) return _mm512_movm_epi8(load<uint64_t>(high + 8 * i));
  if constexpr (Of::kHigh == 2) return fields<2>(_mm512_cvtepu16_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(high))));
  if constexpr (Of::kHigh == 3) {
    const __m512i three_u8x64 = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(0xffffff, high));
    const __m512i bytes_u8x64 = _mm512_add_epi64(
        _mm512_set1_epi64(0x020100), _mm512_mullo_epi64(_mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi64(0x030303)));
    return fields<3>(_mm512_maskz_permutexvar_epi8(0x0707070707070707, bytes_u8x64, three_u8x64));
  }
  return fields<4>(_mm512_cvtepu32_epi64(load_32(high)));
}

// Bytes of points of eight, or of signs, by group: rows become lanes.
FEWBITS_VBMI_INLINE void by_group(__m512i first_x64, __m512i last_x64, __m512i& group_0, __m512i& group_1) {
  group_0 = _mm512_unpacklo_epi16(first_x64, last_x64);
  group_1 = _mm512_unpackhi_epi16(first_x64, last_x64);
}

template <typename Of>
FEWBITS_VBMI_INLINE Points<Of> read_points(const uint8_t* chunk, const uint8_t* codes, size_t block) {
  Points<Of> points;
  const uint8_t* const high = codes + 64 * Of::kRegisters + Of::kSignBytes;
  const __m512i one_u8x64 = _mm512_set1_epi8(1), tables_u8x64 = _mm512_set1_epi8(static_cast<char>(Of::kTables - 1));
  __m512i signs_u8x64 = _mm512_setzero_si512();
  if constexpr (!Of::kShifts) signs_u8x64 = load_64(codes + 64 * Of::kRegisters);
#pragma GCC unroll 2
  for (size_t i = 0; i < Of::kRegisters; ++i) {
    points.index[i] = load_64(codes + 64 * i);
    const __m512i eighth_u8x64 = _mm512_srli_epi16(points.index[i], 7);
    if constexpr (Of::kTables == 2) {
      points.key[i] = _mm512_and_si512(eighth_u8x64, one_u8x64);
    } else {
      const __m512i above_u8x64 = bits_above<Of>(high, i, signs_u8x64);
      points.key[i] = _mm512_and_si512(_mm512_ternarylogic_epi64(one_u8x64, eighth_u8x64, above_u8x64, 0xca), tables_u8x64);
      if constexpr (Of::kSigns == Signs::kOfPoint)
        signs_u8x64 = _mm512_movm_epi8(_mm512_test_epi8_mask(above_u8x64, _mm512_set1_epi8(16)));
    }
  }
  if constexpr (Of::kSigns == Signs::kOfRun) {
    const __m128i nibbles_u8x16 = _mm_loadu_si128(reinterpret_cast<const __m128i*>(chunk + 2 * kStripe + block / 2 * kStripe));
    points.sign[0] = points.sign[1] = _mm512_movm_epi32(_mm_test_epi8_mask(nibbles_u8x16, _mm_set1_epi8(block % 2 ? -128 : 8)));
    return points;
  }
  if constexpr (Of::kSigns == Signs::kSeven)
    signs_u8x64 = _mm512_permutex2var_epi8(load_64(kEightSigns.data()), _mm512_srli_epi16(signs_u8x64, 1),
                                           load_64(kEightSigns.data() + 64));
  by_group(signs_u8x64, Of::kShifts ? signs_u8x64 : _mm512_srli_epi16(signs_u8x64, 4), points.sign[0], points.sign[1]);
  return points;
}

// Entries of both tables. An index stays in its byte until its 128 entries are read.
template <typename Of>
FEWBITS_VBMI_INLINE void look_up(const Codebook& codebook, const Points<Of> (&points)[Of::kTogether],
                                 Entries (&into)[Of::kTogether]) {
  __m512i found[Of::kTogether][Of::kRegisters][2];
#pragma GCC unroll 4
  for (size_t s = 0; s < Of::kTogether; ++s)
#pragma GCC unroll 2
    for (size_t i = 0; i < Of::kRegisters; ++i) found[s][i][0] = found[s][i][1] = points[s].index[i];
#pragma GCC unroll 16
  for (size_t t = 0; t < Of::kTables; ++t) {
    const __m512i number_u8x64 = _mm512_set1_epi8(static_cast<char>(t));
    __m512i table[2][2];
#pragma GCC unroll 2
    for (size_t half = 0; half < 2; ++half) {
      table[half][0] = load_64(codebook.codes[half] + 128 * t);
      table[half][1] = load_64(codebook.codes[half] + 128 * t + 64);
    }
#pragma GCC unroll 4
    for (size_t s = 0; s < Of::kTogether; ++s)
#pragma GCC unroll 2
      for (size_t i = 0; i < Of::kRegisters; ++i) {
        const __mmask64 here = _mm512_cmpeq_epi8_mask(points[s].key[i], number_u8x64);
#pragma GCC unroll 2
        for (size_t half = 0; half < 2; ++half)
          found[s][i][half] = _mm512_mask2_permutex2var_epi8(table[half][0], found[s][i][half], here, table[half][1]);
      }
  }
#pragma GCC unroll 4
  for (size_t s = 0; s < Of::kTogether; ++s) {
    if constexpr (Of::kDims == 8) {
      by_group(found[s][0][0], found[s][0][1], into[s].of[0][0], into[s].of[1][0]);
    } else {
#pragma GCC unroll 2
      for (size_t group = 0; group < 2; ++group)
#pragma GCC unroll 2
        for (size_t half = 0; half < 2; ++half) into[s].of[group][half] = found[s][group][half];
    }
  }
}

// Columns c, c + 8, c + 4, c + 12 of a group.
template <typename Of>
FEWBITS_VBMI_INLINE __m512i bytes_of(const Entries& entries, const Points<Of>& points, size_t group, int c,
                                     __m512i levels_u8x64) {
  const __m512i entry_u8x64 = Of::kDims == 8 ? _mm512_srli_epi16(entries.of[group][0], 2 * static_cast<unsigned>(c))
                                             : _mm512_srli_epi16(entries.of[group][c / 2], 3 * static_cast<unsigned>(c % 2));
  __m512i sign_u8x64 = points.sign[group];
  if constexpr (!Of::kShifts) {
    if (c < Of::kCodeBits)
      sign_u8x64 = _mm512_slli_epi16(sign_u8x64, static_cast<unsigned>(Of::kCodeBits - c));
    else if (c > Of::kCodeBits)
      sign_u8x64 = _mm512_srli_epi16(sign_u8x64, static_cast<unsigned>(c - Of::kCodeBits));
  }
  const __m512i code_u8x64 = _mm512_set1_epi8((1 << Of::kCodeBits) - 1);
  return _mm512_permutexvar_epi8(_mm512_ternarylogic_epi64(code_u8x64, entry_u8x64, sign_u8x64, 0xca), levels_u8x64);
}

// Activations of a chunk in the order of the columns of bytes_of.
FEWBITS_VBMI_INLINE void order_activations(const int8_t* from, int8_t* into) {
  const __m512i order_u8x64 = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15));
#pragma GCC unroll 4
  for (size_t i = 0; i < kChunk; i += 64) _mm512_store_si512(into + i, _mm512_shuffle_epi8(load_64(from + i), order_u8x64));
}

template <typename Of>
FEWBITS_VBMI void dot(const Tiling& tiling, StripeSums (&stripes)[kStreams], size_t, const ActivationRow& x, size_t first) {
  alignas(64) int8_t q[kChunk];
  order_activations(x.q + 32 * first, q);
  const Codebook& codebook = *tiling.bytes.codebook;
  const __m512i levels_u8x64 = load_64(codebook.levels);
  for (size_t from = 0; from < kStreams; from += Of::kTogether) {
    __m512 total_f32x16[Of::kTogether];
#pragma GCC unroll 4
    for (size_t s = 0; s < Of::kTogether; ++s) total_f32x16[s] = _mm512_load_ps(stripes[from + s].total);
    for (size_t b = 0; b < kChunkBlocks; ++b) {
      Points<Of> points[Of::kTogether];
      Entries entries[Of::kTogether];
#pragma GCC unroll 4
      for (size_t s = 0; s < Of::kTogether; ++s) {
        const uint8_t* const codes = stripes[from + s].codes + Of::kBlockBytes * b;
        for (size_t line = 0; line < Of::kBlockBytes; line += 64)
          _mm_prefetch(reinterpret_cast<const char*>(codes) + kAheadOfEach + line, _MM_HINT_T0);
        points[s] = read_points<Of>(stripes[from + s].header, codes, b);
      }
      look_up<Of>(codebook, points, entries);
      const __m512 x_scale_f32x16 = _mm512_set1_ps(x.scale[first + b]);
#pragma GCC unroll 4
      for (size_t s = 0; s < Of::kTogether; ++s) {
        __m512i sum_i32x16 = _mm512_set1_epi32(Of::kBy16 ? x.zeros_16[2 * (first + b)] : x.zeros[first + b]);
#pragma GCC unroll 2
        for (size_t group = 0; group < 2; ++group) {
#pragma GCC unroll 4
          for (int c = 0; c < 4; ++c) {
            const __m512i x_i8x64 =
                _mm512_set1_epi32(load<int32_t>(reinterpret_cast<const uint8_t*>(q) + 32 * b + 16 * group + 4 * c));
            sum_i32x16 = _mm512_dpbusd_epi32(sum_i32x16, bytes_of(entries[s], points[s], group, c, levels_u8x64), x_i8x64);
          }
          if (!Of::kBy16 && group == 0) continue;
          const float* const scale = stripes[from + s].scale[Of::kBy16 ? 2 * b + group : b];
          const __m512 scale_f32x16 = _mm512_mul_ps(_mm512_load_ps(scale), x_scale_f32x16);
          total_f32x16[s] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum_i32x16), scale_f32x16, total_f32x16[s]);
          if (Of::kBy16) sum_i32x16 = _mm512_set1_epi32(x.zeros_16[2 * (first + b) + 1]);
        }
      }
    }
#pragma GCC unroll 4
    for (size_t s = 0; s < Of::kTogether; ++s) _mm512_store_ps(stripes[from + s].total, total_f32x16[s]);
  }
}

// Four registers with columns c, c + 8, c + 4, c + 12 in a lane, to four with columns 4j .. 4j + 3.
FEWBITS_VBMI_INLINE void store_in_order(const __m512i (&by_c)[4], size_t lane, uint8_t (*into)[kPanelRows][4]) {
  const __m512i low_x64 = _mm512_set1_epi16(0x00ff), first_x64 = _mm512_set1_epi32(0x0000ffff);
  __m512i even[2], odd[2];  // bytes 0 and 2, 1 and 3, of two registers
#pragma GCC unroll 2
  for (size_t i = 0; i < 2; ++i) {
    even[i] = _mm512_ternarylogic_epi64(low_x64, by_c[2 * i], _mm512_slli_epi16(by_c[2 * i + 1], 8), 0xca);
    odd[i] = _mm512_ternarylogic_epi64(low_x64, _mm512_srli_epi16(by_c[2 * i], 8), by_c[2 * i + 1], 0xca);
  }
  const auto store = [&](size_t j, __m512i low, __m512i high) FEWBITS_VBMI {
    _mm512_store_si512(into[j][lane], _mm512_ternarylogic_epi64(first_x64, low, high, 0xca));
  };
  store(0, even[0], _mm512_slli_epi32(even[1], 16));
  store(1, _mm512_srli_epi32(even[0], 16), even[1]);
  store(2, odd[0], _mm512_slli_epi32(odd[1], 16));
  store(3, _mm512_srli_epi32(odd[0], 16), odd[1]);
}

template <typename Of>
FEWBITS_VBMI void unpack(const Tiling& tiling, const uint8_t* codes, size_t, size_t, size_t lane,
                         uint8_t (*into)[kPanelRows][4]) {
  const Codebook& codebook = *tiling.bytes.codebook;
  const __m512i levels_u8x64 = load_64(codebook.levels);
  const uint8_t* const chunk = codes - tiling.header_bytes(kChunkBlocks);
  for (size_t b = 0; b < kChunkBlocks; b += Of::kTogether) {
    Points<Of> points[Of::kTogether];
    Entries entries[Of::kTogether];
#pragma GCC unroll 4
    for (size_t k = 0; k < Of::kTogether; ++k) points[k] = read_points<Of>(chunk, codes + Of::kBlockBytes * (b + k), b + k);
    look_up<Of>(codebook, points, entries);
#pragma GCC unroll 4
    for (size_t k = 0; k < Of::kTogether; ++k)
#pragma GCC unroll 2
      for (size_t group = 0; group < 2; ++group) {
        __m512i by_c[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) by_c[c] = bytes_of(entries[k], points[k], group, c, levels_u8x64);
        store_in_order(by_c, lane, into + 8 * (b + k) + 4 * group);
      }
  }
}

// unit * (2s + 1), rounded nowhere: d has 11 bits, and 2s + 1 five.
FEWBITS_VBMI_INLINE void store_scale(__m512i s_i32x16, __m512 unit_f32x16, float* into) {
  const __m512i odd_i32x16 = _mm512_or_si512(_mm512_slli_epi32(s_i32x16, 1), _mm512_set1_epi32(1));
  _mm512_storeu_ps(into, _mm512_mul_ps(_mm512_cvtepi32_ps(odd_i32x16), unit_f32x16));
}

template <typename Of>
FEWBITS_VBMI void expand(const Tiling& tiling, const uint8_t* chunk, size_t, float* scale, float*, size_t stride) {
  const __m512 unit_f32x16 = _mm512_set1_ps(tiling.bytes.codebook->unit);
  const auto sixteen = [&](size_t i) FEWBITS_VBMI { return _mm512_cvtepu16_epi32(load_32(chunk + 2 * kStripe * i)); };
  if constexpr (Of::kSigns == Signs::kOfPoint) {
    __m512i word_i32x16[4], d_i32x16 = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (unsigned i = 0; i < 4; ++i) {
      word_i32x16[i] = sixteen(i);
      d_i32x16 = _mm512_or_si512(d_i32x16, _mm512_slli_epi32(_mm512_srli_epi32(word_i32x16[i], 12), 4 * i));
    }
    const __m512 d_f32x16 = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(d_i32x16)), unit_f32x16);
#pragma GCC unroll 16
    for (unsigned i = 0; i < 16; ++i)
      store_scale(_mm512_and_si512(_mm512_srli_epi32(word_i32x16[i / 4], 3 * (i % 4)), _mm512_set1_epi32(7)), d_f32x16,
                  scale + i * stride);
    return;
  }
  const __m512 d_f32x16 = _mm512_mul_ps(_mm512_cvtph_ps(load_32(chunk)), unit_f32x16);
  if constexpr (Of::kScaleBesideSigns) {
    const uint8_t* signs = chunk + 2 * kStripe + 64 * Of::kRegisters;
    // the four bits of a row, by group; unpacking gives two of them twice: weights 1 and 2, or 4 and 8
    const __m512i bit_u8x64 = _mm512_set1_epi8(1), low_i8x64 = _mm512_set1_epi32(0x00000201),
                  high_i8x64 = _mm512_set1_epi32(0x00000804);
    for (size_t b = 0; b < kChunkBlocks; ++b, signs += Of::kBlockBytes) {
      __m512i group_u8x64[2];
      const __m512i bits_u8x64 = _mm512_and_si512(load_64(signs), bit_u8x64);
      by_group(bits_u8x64, bits_u8x64, group_u8x64[0], group_u8x64[1]);
      const __m512i two_i32x16 = _mm512_dpbusd_epi32(_mm512_setzero_si512(), group_u8x64[0], low_i8x64);
      store_scale(_mm512_dpbusd_epi32(two_i32x16, group_u8x64[1], high_i8x64), d_f32x16, scale + b * stride);
    }
    return;
  }
  const __m512i mask_i32x16 = _mm512_set1_epi32(Of::kSigns == Signs::kOfRun ? 7 : 15);
#pragma GCC unroll 8
  for (size_t i = 0; i < (Of::kBy16 ? 8 : 4); ++i) {
    const __m512i two_i32x16 =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(chunk + 2 * kStripe + kStripe * i)));
    store_scale(_mm512_and_si512(two_i32x16, mask_i32x16), d_f32x16, scale + 2 * i * stride);
    store_scale(_mm512_and_si512(_mm512_srli_epi32(two_i32x16, 4), mask_i32x16), d_f32x16, scale + (2 * i + 1) * stride);
  }
}

template <typename Of>
TileFunctions functions() {
  return {expand<Of>, unpack<Of>, dot<Of>};
}

}  // namespace

bool has_vbmi() { return has_avx512() && __builtin_cpu_supports("avx512vbmi"); }

TileFunctions tiles_codebook_avx512(const ByteTraits& bytes) {
  const Codebook& codebook = *bytes.codebook;
  if (codebook.signs == Signs::kOfRun) return functions<Kind<8, 2048, Signs::kOfRun, false>>();
  if (codebook.signs == Signs::kOfPoint) return functions<Kind<8, 2048, Signs::kOfPoint, true>>();
  if (codebook.dims == 4) {
    if (codebook.points == 256) return functions<Kind<4, 256, Signs::kSeven, false>>();
    return functions<Kind<4, 512, Signs::kEight, false>>();
  }
  if (codebook.points == 256) return functions<Kind<8, 256, Signs::kSeven, false>>();
  if (codebook.points == 512) return functions<Kind<8, 512, Signs::kSeven, true>>();
  return functions<Kind<8, 1024, Signs::kEight, true>>();
}

}  // namespace fewbits
#endif
