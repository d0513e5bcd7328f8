// Four rows of a chunk in tiles_codebook.h's layout for AVX2: their scales, signs and points, in registers of four rows by eight
// columns.
#pragma once

#include "matmul/tiles_codebook.h"
#include "platform/avx2.h"

#if defined(__x86_64__)
namespace fewbits::avx2 {

// What the kernels know of a format when they are compiled.
template <FoursLayout kLayout>
struct Fours {
  static constexpr FoursLayout kOf = kLayout;
  static constexpr Signs kSigns = kLayout.signs;
  static constexpr size_t kDims = kLayout.dims, kHigh = kLayout.high_bits;
  static constexpr bool kBy16 = kLayout.by_16, kShifts = kSigns >= Signs::kOfRun;
  static constexpr size_t kBytes = kLayout.index_at() + 4 * kLayout.index_bytes();  // of a chunk
  static constexpr size_t kPointBits = kHigh - (kSigns == Signs::kOfPoint);         // of the index, beyond eight
  // How many pairs of products fit 16 bits: those of iq1's and iq3_s's bytes in a block, 32 columns; others in 16 columns.
  static constexpr size_t kChain = !kBy16 && (kSigns == Signs::kOfRun || (kDims == 4 && kHigh)) ? 4 : 2;
};

// [row][8 bytes] of the byte in question: number `b` of each row's eight.
FEWBITS_AVX2_INLINE __m256i bytes_for_rows(__m256i eights_u8x32, size_t b) {
  const __m256i rows_u8x32 = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8,  //
                                              0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8);
  return _mm256_shuffle_epi8(eights_u8x32, _mm256_add_epi8(rows_u8x32, _mm256_set1_epi8(static_cast<char>(b))));
}

// The same as 16-bit numbers.
FEWBITS_AVX2_INLINE __m256i words_for_rows(__m256i eights_u8x32, size_t b) {
  const __m256i rows_u8x32 = _mm256_setr_epi8(0, -1, 0, -1, 0, -1, 0, -1, 8, -1, 8, -1, 8, -1, 8, -1,  //
                                              0, -1, 0, -1, 0, -1, 0, -1, 8, -1, 8, -1, 8, -1, 8, -1);
  return _mm256_shuffle_epi8(eights_u8x32, _mm256_or_si256(rows_u8x32, _mm256_set1_epi8(static_cast<char>(b))));
}

// 2s + 1
FEWBITS_AVX2_INLINE __m256i odd(__m256i s_x32) { return _mm256_sub_epi8(_mm256_add_epi8(s_x32, s_x32), _mm256_set1_epi8(-1)); }

// Four rows of a chunk.
template <typename Of>
struct Four {
  const uint8_t *signs, *high, *index;
  __m256i odd_x32[Of::kSigns == Signs::kOfPoint ? 4 : 2];  // [row][8 blocks] of each half; of iq1_m words, [row][64 columns]
  __m256i down_x32;                                        // the shifts of iq1_s are the highest bits of [row][8 blocks]

  FEWBITS_AVX2_INLINE Four(const uint8_t* chunk, size_t four)
      : signs(chunk + Of::kOf.signs_at() + 4 * four * Of::kOf.sign_bytes()),
        high(chunk + Of::kOf.high_at() + four * Of::kOf.high_bytes()),
        index(chunk + Of::kOf.index_at() + four * Of::kOf.index_bytes()) {
    const uint8_t* const scales = chunk + Of::kOf.scales_at() + four * Of::kOf.scale_bytes();
    const __m256i nibble_u8x32 = _mm256_set1_epi8(15);
    if constexpr (Of::kSigns == Signs::kOfPoint) {
      const __m256i words_u16x16 = load_32(scales), three_u16x16 = _mm256_set1_epi16(14), one_u16x16 = _mm256_set1_epi16(1);
      odd_x32[0] = _mm256_slli_epi16(words_u16x16, 1);
      odd_x32[1] = _mm256_srli_epi16(words_u16x16, 2);
      odd_x32[2] = _mm256_srli_epi16(words_u16x16, 5);
      odd_x32[3] = _mm256_srli_epi16(words_u16x16, 8);
#pragma GCC unroll 4
      for (__m256i& each : odd_x32) each = _mm256_or_si256(_mm256_and_si256(each, three_u16x16), one_u16x16);
    } else if constexpr (Of::kBy16) {
      const __m256i both_u8x32 = load_32(scales);
      odd_x32[0] = odd(_mm256_and_si256(both_u8x32, nibble_u8x32));
      odd_x32[1] = odd(_mm256_and_si256(_mm256_srli_epi16(both_u8x32, 4), nibble_u8x32));
    } else {
      const __m256i s_u8x32 = nibbles_by_half(scales);
      if constexpr (Of::kShifts) {
        down_x32 = _mm256_slli_epi16(s_u8x32, 4);
        odd_x32[0] = odd(_mm256_and_si256(s_u8x32, _mm256_set1_epi8(7)));
      } else {
        odd_x32[0] = odd(s_u8x32);
      }
    }
  }

  // The scale of 32 columns, or of the halves of them.
  FEWBITS_AVX2_INLINE __m256i scale(size_t b, size_t half) const {
    if constexpr (Of::kSigns == Signs::kOfPoint) return words_for_rows(odd_x32[b % 2 * 2 + half], b / 2 * 2);
    return words_for_rows(odd_x32[Of::kBy16 ? half : 0], b);
  }
};

// Of 64 columns of four rows: signs, and the indices of points beyond bytes.
template <typename Of>
struct Set {
  __m256i signs_x32;  // bit i is of the i-th eight columns, but bit 0 is set; of iq1_m all bits, in the order of its indices
  __m256i first_x32;  // the signs of the first eight columns, in the highest bits
  alignas(32) uint16_t index[Of::kPointBits ? 256 / Of::kDims : 1];
  const uint8_t* low;

  FEWBITS_AVX2_INLINE void read(const Four<Of>& four, size_t number) {
    low = four.index + number * (256 / Of::kDims);
    if constexpr (!Of::kShifts) {
      const __m256i all_x32 = signs_at(four.signs + number * Of::kOf.sign_bytes()), one_u8x32 = _mm256_set1_epi8(1);
      signs_x32 = _mm256_or_si256(all_x32, one_u8x32);
      first_x32 = _mm256_or_si256(_mm256_slli_epi16(all_x32, 7), one_u8x32);
    }
    if constexpr (Of::kPointBits != 0) {
      if constexpr (Of::kDims == 8) {
        store_index(above(four.high, number), 0);
      } else {
#pragma GCC unroll 2
        for (size_t i = 0; i < 2; ++i) {
          const __m256i bit_u8x32 = _mm256_srl_epi16(load_32(four.high), _mm_cvtsi32_si128(static_cast<int>(2 * number + i)));
          store_index(_mm256_and_si256(bit_u8x32, _mm256_set1_epi8(1)), 32 * i);
        }
      }
    }
  }

  // Columns `eight` and `eight + 1` of eight, `eight` even: registers of four points of eight, or of eight of four.
  FEWBITS_AVX2_INLINE void points(const uint8_t* grid, size_t eight, __m256i (&into)[2]) const {
    if constexpr (Of::kDims == 8) {
      size_t at[4][2];  // of the rows
#pragma GCC unroll 4
      for (size_t row = 0; row < 4; ++row) two_indices(16 * (row / 2) + 8 * (eight / 4) + 4 * (row % 2) + eight % 4, at[row]);
#pragma GCC unroll 2
      for (size_t i = 0; i < 2; ++i) {
        const auto two = [&](size_t row) __attribute__((always_inline, target("avx2,fma,f16c"))) {
          const __m128i first_u8x8 = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(grid + 8 * at[row][i]));
          const auto* const second = reinterpret_cast<const __m64*>(grid + 8 * at[row + 1][i]);
          return _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(first_u8x8), second));
        };
        into[i] = _mm256_set_m128i(two(2), two(0));
      }
    } else {
#pragma GCC unroll 2
      for (size_t i = 0; i < 2; ++i) {
        const auto four = [&](size_t row) __attribute__((always_inline, target("avx2,fma,f16c"))) {
          size_t at[2][2];  // of two rows
          const size_t place = 32 * (eight / 4) + 16 * (row / 2) + 4 * (eight % 4 + i);
          two_indices(place, at[0]);
          two_indices(place + 2, at[1]);
          const auto point = [&](size_t k) __attribute__((always_inline)) { return load<int32_t>(grid + 4 * at[k / 2][k % 2]); };
          return _mm_setr_epi32(point(0), point(1), point(2), point(3));
        };
        into[i] = _mm256_set_m128i(four(2), four(0));
      }
    }
  }

  // The signs of eight columns, in the highest bits; never zero, because below them is the lowest bit, which is always set.
  FEWBITS_AVX2_INLINE __m256i signs(size_t eight) const {
    if (eight == 0) return first_x32;
    return _mm256_slli_epi16(signs_x32, static_cast<int>(7 - eight));
  }

 private:
  // A load of two and a shift: processors load less often in a cycle than they calculate.
  FEWBITS_AVX2_INLINE void two_indices(size_t place, size_t (&into)[2]) const {
    if constexpr (Of::kPointBits != 0) {  // unpacked: the quarters 0 2 1 3
      const size_t quarter = place / 8 % 4, to = place / 32 * 32 + (quarter % 2 * 2 + quarter / 2) * 8 + place % 8;
      uint32_t two = load<uint32_t>(reinterpret_cast<const uint8_t*>(index + to));
      asm("" : "+r"(two));  // compilers would load each of them
      into[0] = two & 0xffff;
      into[1] = two >> 16;
    } else {
      uint32_t two = load<uint16_t>(low + place);
      asm("" : "+r"(two));
      into[0] = two & 0xff;
      into[1] = two >> 8;
    }
  }

  FEWBITS_AVX2_INLINE void store_index(__m256i above_u8x32, size_t first) {
    const __m256i low_u8x32 = load_32(low + first);
    _mm256_store_si256(reinterpret_cast<__m256i*>(index + first), _mm256_unpacklo_epi8(low_u8x32, above_u8x32));
    _mm256_store_si256(reinterpret_cast<__m256i*>(index + first + 16), _mm256_unpackhi_epi8(low_u8x32, above_u8x32));
  }

  // Bits of 32 indices beyond eight, of points of eight.
  FEWBITS_AVX2_INLINE __m256i above(const uint8_t* high, size_t number) {
    const int set = static_cast<int>(number);
    if constexpr (Of::kHigh == 4) {
      const __m256i field_u8x32 = _mm256_srl_epi16(load_32(high + number / 2 * 32), _mm_cvtsi32_si128(set % 2 * 4));
      const __m256i shift_u8x32 = _mm256_set1_epi8(8);
      signs_x32 = _mm256_cmpeq_epi8(_mm256_and_si256(field_u8x32, shift_u8x32), shift_u8x32);
      return _mm256_and_si256(field_u8x32, _mm256_set1_epi8(7));
    }
    __m256i two_u8x32 = _mm256_setzero_si256();
    if constexpr (Of::kHigh >= 2)
      two_u8x32 = _mm256_and_si256(_mm256_srl_epi16(load_32(high), _mm_cvtsi32_si128(2 * set)), _mm256_set1_epi8(3));
    if constexpr (Of::kHigh == 2) return two_u8x32;
    const __m256i twice_u8x32 = _mm256_broadcastsi128_si256(load_16(high + (Of::kHigh == 3 ? 32 : 0)));
    const __m256i half_i32x8 = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    const __m256i moved_u8x32 = _mm256_srlv_epi32(twice_u8x32, _mm256_add_epi32(half_i32x8, _mm256_set1_epi32(2 * set)));
    const __m256i bit_u8x32 = _mm256_and_si256(moved_u8x32, _mm256_set1_epi8(1));
    return Of::kHigh == 3 ? _mm256_or_si256(two_u8x32, _mm256_slli_epi16(bit_u8x32, 2)) : bit_u8x32;
  }

  // The eighth of seven signs makes their number even: all eight of a row's registers at once.
  FEWBITS_AVX2_INLINE static __m256i signs_at(const uint8_t* at) {
    if constexpr (Of::kSigns != Signs::kSeven) return load_32(at);
    const __m256i spread_u8x32 = _mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, -1, 7, 8, 9, 10, 11, 12, 13, -1,  //
                                                  0, 1, 2, 3, 4, 5, 6, -1, 7, 8, 9, 10, 11, 12, 13, -1);
    const __m256i seven_u8x32 = _mm256_shuffle_epi8(_mm256_set_m128i(load_16(at + 14), load_16(at)), spread_u8x32);
    __m256i sum_u8x32 = _mm256_xor_si256(seven_u8x32, _mm256_slli_epi64(seven_u8x32, 32));
    sum_u8x32 = _mm256_xor_si256(sum_u8x32, _mm256_slli_epi64(sum_u8x32, 16));
    sum_u8x32 = _mm256_xor_si256(sum_u8x32, _mm256_slli_epi64(sum_u8x32, 8));
    const __m256i eighth_u8x32 = _mm256_and_si256(sum_u8x32, _mm256_set1_epi64x(static_cast<int64_t>(255ull << 56)));
    return _mm256_or_si256(seven_u8x32, eighth_u8x32);
  }
};

// Eight rows of a chunk. All their indices are computed first: they are loaded again only when they have left the store buffer.
template <typename Of>
struct Eight {
  Four<Of> fours[2];
  Set<Of> sets[kChunkBlocks / 2][2];

  FEWBITS_AVX2_INLINE Eight(const uint8_t* chunk, size_t row) : fours{Four<Of>(chunk, row / 4), Four<Of>(chunk, row / 4 + 1)} {
#pragma GCC unroll 4
    for (size_t number = 0; number < kChunkBlocks / 2; ++number)
      for (size_t f = 0; f < 2; ++f) sets[number][f].read(fours[f], number);
    asm("" : "+m"(sets));  // in memory from here on: taking indices out of registers is slower than loading them
  }
};

}  // namespace fewbits::avx2
#endif
