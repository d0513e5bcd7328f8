// tiles_codebook.h with AVX2: a load for each point, and as little as possible besides. A register holds four rows by eight
// columns, so that sums of several registers are added in 16 bits and widened once, and scales are multiplied as integers, when
// they are widened: floats are left for one product in 128 weights. A sign is one shift away from the top bit of its byte.
#include "matmul/tiles_codebook_avx2.h"

#if defined(__x86_64__)
namespace fewbits {
namespace {

using namespace avx2;

// What the bytes of iq1 owe for 9 and their shift: -8 times the sum of x, or -10 times it if it is down. Of iq1_s the sums are of
// four pairs of columns, in the lanes of 16 bits where products with them are; of iq1_m of four eights of columns.
struct Owed {
  __m256i of[kChunkBlocks][2];
};

template <typename Of>
FEWBITS_AVX2 void fill_owed(const int8_t* q, Owed& owed) {
  const __m256i ones_u8x32 = _mm256_set1_epi8(1), ones_i16x16 = _mm256_set1_epi16(1);
  for (size_t b = 0; b < kChunkBlocks; ++b) {
    const __m256i pairs_i16x16 = _mm256_maddubs_epi16(ones_u8x32, load_32(reinterpret_cast<const uint8_t*>(q) + 32 * b));
    __m256i sums_i16x16;
    if constexpr (Of::kBy16) {
      const __m256i fours_i32x8 = _mm256_madd_epi16(pairs_i16x16, ones_i16x16);
      const __m256i eights_i32x8 = _mm256_add_epi32(fours_i32x8, _mm256_srli_epi64(fours_i32x8, 32));
      const __m256i low_i16x16 = _mm256_shuffle_epi8(eights_i32x8, _mm256_set1_epi64x(-1ll << 32 | 0x09080100));
      const int64_t four = static_cast<uint32_t>(_mm256_extract_epi32(low_i16x16, 0)) |
                           static_cast<int64_t>(_mm256_extract_epi32(low_i16x16, 4)) << 32;
      sums_i16x16 = _mm256_set1_epi64x(four);
    } else {
      const __m128i two_i16x8 = _mm_add_epi16(_mm256_castsi256_si128(pairs_i16x16), _mm256_extracti128_si256(pairs_i16x16, 1));
      sums_i16x16 = _mm256_broadcastq_epi64(_mm_add_epi16(two_i16x8, _mm_unpackhi_epi64(two_i16x8, two_i16x8)));
    }
    owed.of[b][0] = _mm256_mullo_epi16(sums_i16x16, _mm256_set1_epi16(-8));
    owed.of[b][1] = _mm256_mullo_epi16(sums_i16x16, _mm256_set1_epi16(-10));
  }
}

// Products of four rows with 32 columns, times their scales as integers.
template <typename Of>
FEWBITS_AVX2_INLINE __m256i dot_block(const uint8_t* grid, const Four<Of>& four, const Set<Of>& set, size_t b, size_t in_set,
                                      const __m256i (&x_i8x32)[4], const Owed& owed) {
  __m256i total_i32x8, sum_i16x16;
#pragma GCC unroll 2
  for (size_t half = 0; half < 2; ++half) {
    __m256i bytes_u8x32[2];
    set.points(grid, 4 * in_set + 2 * half, bytes_u8x32);
#pragma GCC unroll 2
    for (size_t i = 0; i < 2; ++i) {
      __m256i here_i8x32 = x_i8x32[2 * half + i];
      if constexpr (!Of::kShifts) here_i8x32 = _mm256_sign_epi8(here_i8x32, set.signs(4 * in_set + 2 * half + i));
      const __m256i pairs_i16x16 = _mm256_maddubs_epi16(bytes_u8x32[i], here_i8x32);
      const bool starts = i == 0 && (Of::kChain == 2 || half == 0);
      sum_i16x16 = starts ? pairs_i16x16 : _mm256_add_epi16(sum_i16x16, pairs_i16x16);
    }
    if (Of::kChain == 4 && half == 0) continue;
    if constexpr (Of::kSigns == Signs::kOfRun) {
      const __m256i down_x32 = bytes_for_rows(four.down_x32, b);
      sum_i16x16 = _mm256_add_epi16(sum_i16x16, _mm256_blendv_epi8(owed.of[b][0], owed.of[b][1], down_x32));
    }
    const __m256i scaled_i32x8 = _mm256_madd_epi16(sum_i16x16, four.scale(b, half));
    total_i32x8 = half == 0 || Of::kChain == 4 ? scaled_i32x8 : _mm256_add_epi32(total_i32x8, scaled_i32x8);
  }
  if constexpr (Of::kSigns == Signs::kOfPoint) {
    const __m256i down_x32 =
        in_set ? _mm256_unpackhi_epi8(set.signs_x32, set.signs_x32) : _mm256_unpacklo_epi8(set.signs_x32, set.signs_x32);
    const __m256i owed_i16x16 = _mm256_blendv_epi8(owed.of[b][0], owed.of[b][1], down_x32);
    const __m256i scales_i16x16 = _mm256_blend_epi16(four.scale(b, 0), four.scale(b, 1), 0xcc);
    total_i32x8 = _mm256_add_epi32(total_i32x8, _mm256_madd_epi16(owed_i16x16, scales_i16x16));
  }
  return total_i32x8;
}

// d of eight rows.
template <typename Of>
FEWBITS_AVX2_INLINE __m256 halves_of_eight(const uint8_t* chunk, size_t first) {
  if constexpr (Of::kSigns != Signs::kOfPoint) return _mm256_cvtph_ps(load_16(chunk + 2 * first));
  const __m256i place_i16x16 = _mm256_set1_epi64x(1ll | 16ll << 16 | 256ll << 32 | 4096ll << 48);
  const auto d_of = [&](size_t four) FEWBITS_AVX2 {  // of each row, from the highest nibbles of its four words
    const __m256i nibbles_u16x16 = _mm256_srli_epi16(load_32(chunk + 32 * four), 12);
    const __m256i two_i32x8 = _mm256_madd_epi16(nibbles_u16x16, place_i16x16);
    return _mm256_castsi256_ps(_mm256_add_epi32(two_i32x8, _mm256_srli_epi64(two_i32x8, 32)));
  };
  const __m256i d_i32x8 = _mm256_castps_si256(_mm256_shuffle_ps(d_of(first / 4), d_of(first / 4 + 1), 0x88));
  return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(d_i32x8), _mm256_extracti128_si256(d_i32x8, 1)));
}

// Eight rows of a chunk.
template <typename Of>
FEWBITS_AVX2_INLINE void dot_eight(const Codebook& codebook, const uint8_t* chunk, size_t first_row, const ActivationRow& x,
                                   size_t first, const Owed& owed, float* total) {
  const uint8_t* const grid = codebook.bytes;
  const Eight<Of> eight(chunk, first_row);
  __m256 sum_f32x8[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  const uint8_t* q = reinterpret_cast<const uint8_t*>(x.q) + 32 * first;
  for (size_t b = 0; b < kChunkBlocks; b += 2) {
#pragma GCC unroll 2
    for (size_t i = 0; i < 2; ++i, q += 32) {
      __m256i x_i8x32[4];
#pragma GCC unroll 4
      for (size_t k = 0; k < 4; ++k) x_i8x32[k] = _mm256_set1_epi64x(load<int64_t>(q + 8 * k));
      const __m256 x_scale_f32x8 = _mm256_set1_ps(x.scale[first + b + i]);
#pragma GCC unroll 2
      for (size_t f = 0; f < 2; ++f) {
        const __m256i dot_i32x8 = dot_block<Of>(grid, eight.fours[f], eight.sets[b / 2][f], b + i, i, x_i8x32, owed);
        sum_f32x8[f] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot_i32x8), x_scale_f32x8, sum_f32x8[f]);
      }
    }
  }
  const __m256 d_f32x8 = _mm256_mul_ps(halves_of_eight<Of>(chunk, first_row), _mm256_set1_ps(codebook.unit));
  const __m256 rows_f32x8 = _mm256_hadd_ps(sum_f32x8[0], sum_f32x8[1]);
  _mm256_store_ps(total, _mm256_fmadd_ps(rows_f32x8, d_f32x8, _mm256_load_ps(total)));
}

template <typename Of>
FEWBITS_AVX2 void dot(const Tiling& tiling, StripeSums (&stripes)[kStreams], size_t, const ActivationRow& x, size_t first) {
  Owed owed;
  if constexpr (Of::kShifts) fill_owed<Of>(x.q + 32 * first, owed);
  for (StripeSums& stripe : stripes) {
    for (size_t line = 0; line < Of::kBytes; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(stripe.header) + kAheadOfEach + line, _MM_HINT_T0);
    for (size_t row = 0; row < kStripe; row += 8)
      dot_eight<Of>(*tiling.bytes.codebook, stripe.header, row, x, first, owed, stripe.total + row);
  }
}

// The bytes of a panel: the zero and a magnitude with its sign, or in iq1 a byte with its shift.
template <typename Of>
FEWBITS_AVX2_INLINE __m256i with_signs(__m256i points_u8x32, const Four<Of>& four, const Set<Of>& set, size_t b, size_t eight,
                                       __m256i zero_u8x32) {
  if constexpr (!Of::kShifts) return _mm256_add_epi8(_mm256_sign_epi8(points_u8x32, set.signs(eight)), zero_u8x32);
  __m256i down_x32;
  if constexpr (Of::kSigns == Signs::kOfRun) {
    down_x32 = bytes_for_rows(four.down_x32, b + eight / 4);
  } else {
    const __m256i rows_u8x32 = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4,  //
                                                0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
    const size_t place = 8 * (eight / 4) + eight % 4;
    down_x32 = _mm256_shuffle_epi8(set.signs_x32, _mm256_add_epi8(rows_u8x32, _mm256_set1_epi8(static_cast<char>(place))));
  }
  const __m256i one_u8x32 = _mm256_set1_epi8(1);
  return _mm256_add_epi8(points_u8x32, _mm256_sign_epi8(one_u8x32, _mm256_or_si256(down_x32, one_u8x32)));
}

template <typename Of>
FEWBITS_AVX2 void unpack(const Tiling& tiling, const uint8_t* codes, size_t, size_t, size_t lane,
                         uint8_t (*into)[kPanelRows][4]) {
  const uint8_t* const chunk = codes - tiling.header_bytes(kChunkBlocks);
  const uint8_t* const grid = tiling.bytes.codebook->bytes;
  const __m256i zero_u8x32 = _mm256_set1_epi8(static_cast<char>(tiling.bytes.zero));
  for (size_t line = 0; line < Of::kBytes; line += 64)
    _mm_prefetch(reinterpret_cast<const char*>(chunk) + kAheadOfEach + line, _MM_HINT_T0);
  for (size_t row = 0; row < kStripe; row += 8) {
    const Eight<Of> eight(chunk, row);
    for (size_t b = 0; b < kChunkBlocks; b += 2) {
#pragma GCC unroll 4
      for (size_t k = 0; k < 8; k += 2) {
        __m256i bytes_x32[2][2];
#pragma GCC unroll 2
        for (size_t f = 0; f < 2; ++f) {
          eight.sets[b / 2][f].points(grid, k, bytes_x32[f]);
#pragma GCC unroll 2
          for (size_t i = 0; i < 2; ++i)
            bytes_x32[f][i] = with_signs<Of>(bytes_x32[f][i], eight.fours[f], eight.sets[b / 2][f], b, k + i, zero_u8x32);
        }
#pragma GCC unroll 2
        for (size_t i = 0; i < 2; ++i) {  // of four rows by eight columns, eight rows by four
          const __m256 first_x32 = _mm256_castsi256_ps(bytes_x32[0][i]), second_x32 = _mm256_castsi256_ps(bytes_x32[1][i]);
          auto* const at = into + 8 * b + 2 * (k + i);
          _mm256_store_ps(reinterpret_cast<float*>(at[0][lane + row]), _mm256_shuffle_ps(first_x32, second_x32, 0x88));
          _mm256_store_ps(reinterpret_cast<float*>(at[1][lane + row]), _mm256_shuffle_ps(first_x32, second_x32, 0xdd));
        }
      }
    }
  }
}

template <typename Of>
FEWBITS_AVX2 void expand(const Tiling& tiling, const uint8_t* chunk, size_t, float* scale, float*, size_t stride) {
  for (size_t row = 0; row < kStripe; row += 8) {
    const Four<Of> fours[2] = {Four<Of>(chunk, row / 4), Four<Of>(chunk, row / 4 + 1)};
    const __m256 d_f32x8 = _mm256_mul_ps(halves_of_eight<Of>(chunk, row), _mm256_set1_ps(tiling.bytes.codebook->unit));
    for (size_t unit = 0; unit < tiling.units(kChunkBlocks); ++unit) {
      const auto of_rows = [&](size_t f) FEWBITS_AVX2 {
        return _mm256_castsi256_ps(Of::kBy16 ? fours[f].scale(unit / 2, unit % 2) : fours[f].scale(unit, 0));
      };
      // a row's scale is in all four of its lanes
      const __m256i twice_i16x16 = _mm256_castps_si256(_mm256_shuffle_ps(of_rows(0), of_rows(1), 0x88));
      const __m256 odd_f32x8 = _mm256_cvtepi32_ps(_mm256_and_si256(twice_i16x16, _mm256_set1_epi32(0xffff)));
      _mm256_storeu_ps(scale + unit * stride + row, _mm256_mul_ps(odd_f32x8, d_f32x8));
    }
  }
}

template <FoursLayout kLayout>
TileFunctions functions() {
  using Of = Fours<kLayout>;
  return {expand<Of>, unpack<Of>, dot<Of>, false};
}

}  // namespace

TileFunctions tiles_codebook_avx2(const ByteTraits& bytes) {
  const Codebook& codebook = *bytes.codebook;
  if (codebook.signs == Signs::kOfRun) return functions<FoursLayout{8, Signs::kOfRun, false, 3}>();
  if (codebook.signs == Signs::kOfPoint) return functions<FoursLayout{8, Signs::kOfPoint, true, 4}>();
  if (codebook.dims == 4) {
    if (codebook.points == 256) return functions<FoursLayout{4, Signs::kSeven, false, 0}>();
    return functions<FoursLayout{4, Signs::kEight, false, 1}>();
  }
  if (codebook.points == 256) return functions<FoursLayout{8, Signs::kSeven, false, 0}>();
  if (codebook.points == 512) return functions<FoursLayout{8, Signs::kSeven, true, 1}>();
  return functions<FoursLayout{8, Signs::kEight, true, 2}>();
}

}  // namespace fewbits
#endif
