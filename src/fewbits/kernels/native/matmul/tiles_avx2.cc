// tiles.h with AVX2: the two halves of a stripe one after the other, eight rows in a register. maddubs adds pairs of products in
// 16 bits; panels_avx2.cc explains how many fit. 8-bit codes lie signed in its tiles.
#include "matmul/tiles_avx2.h"

#if defined(__x86_64__)
namespace fewbits {
namespace {

using namespace avx2;

// AVX2's panels hold 8-bit codes as signed bytes.
template <int kBits, int kByteBits>
FEWBITS_AVX2 void unpack(const Tiling& tiling, const uint8_t* codes, size_t step, size_t blocks, size_t lane,
                         uint8_t (*into)[kPanelRows][4]) {
  const __m256i levels_x32 = levels_of<kByteBits == 8>(tiling.bytes);
  for (size_t b = 0; b < blocks; ++b, codes += step) {
    for (int line = 0; line < kBits; ++line) _mm_prefetch(reinterpret_cast<const char*>(codes) + kAhead + 64 * line, _MM_HINT_T0);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m256i steps[8];
      read_steps<kBits, kBits != kByteBits>(codes + 32 * half, levels_x32, steps);
      for (int k = 0; k < 8; ++k) _mm256_storeu_si256(reinterpret_cast<__m256i*>(into[8 * b + k][lane + 8 * half]), steps[k]);
    }
  }
}

// 16 floats in two registers.
struct Lanes {
  __m256 low, high;
};

FEWBITS_AVX2_INLINE Lanes halves_at(const uint8_t* at) {
  return {_mm256_cvtph_ps(load_16(at)), _mm256_cvtph_ps(load_16(at + 16))};
}

template <bool kSigned>
FEWBITS_AVX2_INLINE Lanes floats_of(__m128i bytes_x16) {
  const __m128i high_x16 = _mm_unpackhi_epi64(bytes_x16, bytes_x16);
  if constexpr (kSigned)
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes_x16)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high_x16))};
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes_x16)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(high_x16))};
}

FEWBITS_AVX2_INLINE Lanes times(const Lanes& a, const Lanes& b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}

FEWBITS_AVX2_INLINE Lanes negative(const Lanes& a) {
  const __m256 sign_f32x8 = _mm256_set1_ps(-0.0f);
  return {_mm256_xor_ps(a.low, sign_f32x8), _mm256_xor_ps(a.high, sign_f32x8)};
}

FEWBITS_AVX2_INLINE void store(float* at, const Lanes& lanes) {
  _mm256_storeu_ps(at, lanes.low);
  _mm256_storeu_ps(at + 8, lanes.high);
}

// out[unit] = factor * (integer - zero), from the planes that tiles.cc writes.
FEWBITS_AVX2_INLINE void expand_six(const uint8_t* at, size_t units, int zero, const Lanes& factor, float* out, size_t stride) {
  const __m128i nibble_u8x16 = _mm_set1_epi8(15), top_u8x16 = _mm_set1_epi8(48),
                zero_i8x16 = _mm_set1_epi8(static_cast<char>(zero));
  for (size_t first = 0; first < units; first += 8, at += 96)
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const __m128i low_u8x16 = _mm_and_si128(_mm_srli_epi16(load_16(at + 16 * (i % 4)), i / 4 * 4), nibble_u8x16);
      const __m128i both_u8x16 = load_16(at + 64 + 16 * (i % 2));
      const int from = i / 2 * 2;
      const __m128i moved_u8x16 = from >= 4 ? _mm_srli_epi16(both_u8x16, from - 4) : _mm_slli_epi16(both_u8x16, 4 - from);
      const __m128i six_u8x16 = _mm_or_si128(low_u8x16, _mm_and_si128(moved_u8x16, top_u8x16));
      store(out + (first + static_cast<size_t>(i)) * stride, times(floats_of<true>(_mm_sub_epi8(six_u8x16, zero_i8x16)), factor));
    }
}

FEWBITS_AVX2 void expand_nested(const Tiling& tiling, const uint8_t* chunk, size_t blocks, float* scale, float* offset,
                                size_t stride) {
  const ByteTraits& bytes = tiling.bytes;
  const size_t units = tiling.units(blocks);
  const Lanes d = halves_at(chunk), minus_dmin = negative(halves_at(chunk + (bytes.offsets ? 2 * kStripe : 0)));
  const uint8_t* const at = chunk + (bytes.offsets ? 4 : 2) * kStripe;
  if (bytes.scales == Scales::kSixBits) {
    expand_six(at, units, bytes.sub_zero, d, scale, stride);
    if (bytes.offsets) expand_six(at + tiling.integer_bytes(blocks), units, 0, minus_dmin, offset, stride);
    return;
  }
  const __m128i nibble_u8x16 = _mm_set1_epi8(15);
  for (size_t i = 0; i < units; ++i) {
    const __m128i bytes_x16 = load_16(at + kStripe * i);
    if (bytes.scales == Scales::kEightBits) {
      store(scale + i * stride, times(floats_of<true>(bytes_x16), d));
    } else {
      store(scale + i * stride, times(floats_of<false>(_mm_and_si128(bytes_x16, nibble_u8x16)), d));
      store(offset + i * stride, times(floats_of<false>(_mm_and_si128(_mm_srli_epi16(bytes_x16, 4), nibble_u8x16)), minus_dmin));
    }
  }
}

// Integers without minima, of 16 columns each.
FEWBITS_AVX2 void expand_integers(const Tiling& tiling, const uint8_t* chunk, size_t blocks, Panel& panel, size_t unit,
                                  size_t lane) {
  const size_t units = tiling.units(blocks);
  const uint8_t* integers = chunk + 2 * kStripe;
  store(&panel.d[unit / (2 * kChunkBlocks)][lane], halves_at(chunk));
  alignas(32) uint8_t six[2 * kChunkBlocks * kStripe];
  if (tiling.bytes.scales == Scales::kSixBits) {
    bytes_of_six<true>(integers, units, tiling.bytes.sub_zero, six);
    integers = six;
  }
  const __m256i twice_u8x32 = _mm256_setr_epi8(0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7,  //
                                               0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7);
  for (size_t i = 0; i < units; ++i) {
    const __m256i words_i16x16 = _mm256_cvtepi8_epi16(load_16(integers + kStripe * i));
    const __m256i first_i16x16 = _mm256_permute4x64_epi64(words_i16x16, 0x10),
                  last_i16x16 = _mm256_permute4x64_epi64(words_i16x16, 0x32);
    auto* const into = reinterpret_cast<__m256i*>(&panel.sub[unit + i][lane]);
    _mm256_storeu_si256(into, _mm256_shuffle_epi8(first_i16x16, twice_u8x32));
    _mm256_storeu_si256(into + 1, _mm256_shuffle_epi8(last_i16x16, twice_u8x32));
  }
}

FEWBITS_AVX2 void expand_plain(const Tiling& tiling, const uint8_t* chunk, size_t blocks, float* scale, float* offset,
                               size_t stride) {
  const ByteTraits& bytes = tiling.bytes;
  const bool exponents = bytes.scales == Scales::kExponent;
  const size_t runs = tiling.runs(blocks), units = tiling.units(blocks), each = tiling.unit_of_run();
  const uint8_t* const offsets = chunk + runs * kStripe * (exponents ? 1 : 2);
  for (size_t i = 0; i < runs; ++i) {
    Lanes here, beside{};
    if (exponents) {
      const __m128i e_u8x16 = load_16(chunk + kStripe * i);
      here = {power_of(_mm256_cvtepu8_epi32(e_u8x16)), power_of(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(e_u8x16, e_u8x16)))};
    } else {
      here = halves_at(chunk + 2 * kStripe * i);
    }
    if (bytes.zero_points)
      beside = times(negative(floats_of<true>(load_16(offsets + kStripe * i))), here);
    else if (bytes.offsets)
      beside = halves_at(offsets + 2 * kStripe * i);
    for (size_t unit = i * each; unit < std::min((i + 1) * each, units); ++unit) {
      store(scale + unit * stride, here);
      if (bytes.offsets) store(offset + unit * stride, beside);
    }
  }
}

template <typename Of>
void multiply_by(TileFunctions& of) {
  if constexpr (Of::kNested)
    of.dot = dot_nested<Of>;
  else
    of.dot = dot<Of>;
}

template <int kBits, int kByteBits = kBits>
TileFunctions of_bits(const ByteTraits& bytes) {
  constexpr bool kPlain = kBits == kByteBits;  // no levels
  TileFunctions of{bytes.scales > Scales::kExponent ? expand_nested : expand_plain, unpack<kBits, kByteBits>, nullptr, false};
  const auto is = [&](Scales scales, bool by_16, bool offsets) {
    return bytes.scales == scales && bytes.by_16 == by_16 && bytes.offsets == offsets;
  };
  if (is(Scales::kHalf, false, false)) multiply_by<Kind<kBits, kByteBits, false, false, From::kHalves>>(of);
  if (is(Scales::kSixBits, false, false)) multiply_by<Kind<kBits, kByteBits, false, false, From::kSixBits>>(of);
  if constexpr (!kPlain)
    if (is(Scales::kExponent, false, false)) multiply_by<Kind<kBits, kByteBits, false, false, From::kExponents>>(of);
  if constexpr (kBits == 2)
    if (is(Scales::kFourBits, true, true)) multiply_by<Kind<2, 2, true, true, From::kFourBits>>(of);
  if constexpr (kBits == 3)
    if (is(Scales::kSixBits, true, false)) {
      multiply_by<Kind<3, 3, true, false, From::kSixBits>>(of);
      of.expand_integers = expand_integers;
    }
  if constexpr (kPlain && (kBits == 4 || kBits == 5))
    if (is(Scales::kSixBits, false, true)) multiply_by<Kind<kBits, kBits, false, true, From::kSixBits>>(of);
  if constexpr (kBits == 6)
    if (is(Scales::kEightBits, true, false)) {
      multiply_by<Kind<6, 6, true, false, From::kEightBits>>(of);
      of.expand_integers = expand_integers;
    }
  if (of.dot) return of;
  of.expands = true;
  if (bytes.by_16)
    multiply_by<Kind<kBits, kByteBits, true, false, From::kFloats>>(of);
  else
    multiply_by<Kind<kBits, kByteBits, false, false, From::kFloats>>(of);
  if constexpr (kPlain)
    if (bytes.offsets) {
      if (bytes.by_16)
        multiply_by<Kind<kBits, kBits, true, true, From::kFloats>>(of);
      else
        multiply_by<Kind<kBits, kBits, false, true, From::kFloats>>(of);
    }
  return of;
}

}  // namespace

TileFunctions tiles_avx2(const ByteTraits& bytes) {
  if (bytes.doubled) return of_bits<1>(bytes);
  if (bytes.levels) return bytes.bits == 8 ? of_bits<4, 8>(bytes) : of_bits<4, 5>(bytes);
  switch (bytes.bits) {
    case 2:
      return of_bits<2>(bytes);
    case 3:
      return of_bits<3>(bytes);
    case 4:
      return of_bits<4>(bytes);
    case 5:
      return of_bits<5>(bytes);
    case 6:
      return of_bits<6>(bytes);
    default:
      return of_bits<8>(bytes);
  }
}

}  // namespace fewbits
#endif
