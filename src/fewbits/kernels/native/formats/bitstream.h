// Codes of 2 to 6 bits in one little-endian stream: code i begins at bit kBits * i, so 32 of them are 4 * kBits bytes.
#pragma once

#include "kernels.h"
#include "platform/avx2.h"
#include "platform/neon.h"

namespace fewbits {

template <int kBits>
uint8_t stream_code(const uint8_t* stream, size_t i) {
  const size_t bit = i * kBits;
  const int low = stream[bit / 8] >> (bit % 8);
  if (bit % 8 + kBits <= 8) return static_cast<uint8_t>(low & ((1 << kBits) - 1));
  return static_cast<uint8_t>((low | stream[bit / 8 + 1] << (8 - bit % 8)) & ((1 << kBits) - 1));
}

// Writes whole bytes: if `count` times kBits is no multiple of 8, the last byte is padded with zeros.
template <int kBits>
void pack_stream(const uint8_t* codes, size_t count, uint8_t* stream) {
  uint32_t waiting = 0;
  int bits = 0;
  for (size_t i = 0; i < count; ++i) {
    waiting |= static_cast<uint32_t>(codes[i]) << bits;
    for (bits += kBits; bits >= 8; bits -= 8, waiting >>= 8) *stream++ = static_cast<uint8_t>(waiting);
  }
  if (bits) *stream = static_cast<uint8_t>(waiting);
}

#if defined(__x86_64__)
// Reads exactly 2 * kBits bytes.
template <int kBits>
FEWBITS_AVX2_INLINE __m128i load_half_stream(const uint8_t* at) {
  static_assert(kBits >= 2 && kBits <= 6);
  if constexpr (kBits == 2) return _mm_cvtsi32_si128(load<int32_t>(at));
  if constexpr (kBits == 3) return _mm_insert_epi16(_mm_cvtsi32_si128(load<int32_t>(at)), load<uint16_t>(at + 4), 2);
  const __m128i eight = _mm_cvtsi64_si128(load<int64_t>(at));
  if constexpr (kBits == 5) return _mm_insert_epi16(eight, load<uint16_t>(at + 8), 4);
  if constexpr (kBits == 6) return _mm_insert_epi32(eight, load<int32_t>(at + 8), 2);
  return eight;
}

// 32 codes as bytes. Every 32-bit lane takes the bytes with its four codes, shifts them down to bit 0 and spreads them, one code
// to a byte.
template <int kBits>
FEWBITS_AVX2_INLINE __m256i stream_bytes(const uint8_t* at) {
  if constexpr (kBits == 4) {  // each byte in 16 bits, then its high nibble moved up into the other byte
    const __m256i wide_i16x16 = _mm256_cvtepu8_epi16(load_16(at));
    return _mm256_and_si256(_mm256_or_si256(wide_i16x16, _mm256_slli_epi16(wide_i16x16, 4)), _mm256_set1_epi8(15));
  } else {
    constexpr auto first = [](int lane) { return lane * kBits / 2; };  // the byte in which a lane's codes begin
    const __m128i gather_u8x16 =
        _mm_setr_epi8(first(0), first(0) + 1, first(0) + 2, -1, first(1), first(1) + 1, first(1) + 2, -1,  //
                      first(2), first(2) + 1, first(2) + 2, -1, first(3), first(3) + 1, first(3) + 2, -1);
    const __m256i halves_u8x32 = _mm256_set_m128i(load_half_stream<kBits>(at + 2 * kBits), load_half_stream<kBits>(at));
    const __m256i lanes_i32x8 = _mm256_shuffle_epi8(halves_u8x32, _mm256_broadcastsi128_si256(gather_u8x16));
    constexpr int kOdd = kBits * 4 % 8;  // where the codes of odd lanes begin in their byte
    const __m256i four_i32x8 = _mm256_srlv_epi32(lanes_i32x8, _mm256_setr_epi32(0, kOdd, 0, kOdd, 0, kOdd, 0, kOdd));
    __m256i bytes_u8x32 = _mm256_and_si256(four_i32x8, _mm256_set1_epi32((1 << kBits) - 1));
#pragma GCC unroll 3
    for (int k = 1; k < 4; ++k) {
      const __m256i moved_i32x8 = _mm256_slli_epi32(four_i32x8, (8 - kBits) * k);
      bytes_u8x32 = _mm256_or_si256(bytes_u8x32, _mm256_and_si256(moved_i32x8, _mm256_set1_epi32(((1 << kBits) - 1) << (8 * k))));
    }
    return bytes_u8x32;
  }
}
#elif defined(__aarch64__)
// Reads exactly 2 * kBits bytes.
template <int kBits>
FEWBITS_NEON_INLINE uint8x16_t load_half_stream(const uint8_t* at) {
  static_assert(kBits >= 2 && kBits <= 6);
  uint64_t first = 0, last = 0;
  std::memcpy(&first, at, kBits < 4 ? 2 * kBits : 8);
  if constexpr (kBits > 4) std::memcpy(&last, at + 8, 2 * kBits - 8);
  return vcombine_u8(vcreate_u8(first), vcreate_u8(last));
}

// Where the bits of each of 16 codes are: from bit `shift` of a byte up; the rest are the lowest bits of the next byte.
template <int kBits>
struct StreamPlaces {
  uint8_t byte[16], next[16];
  int8_t down[16], up[16];

  constexpr StreamPlaces() {
    for (int i = 0; i < 16; ++i) {
      const int bit = kBits * i;
      byte[i] = static_cast<uint8_t>(bit / 8);
      next[i] = static_cast<uint8_t>(bit / 8 + 1);
      down[i] = static_cast<int8_t>(-(bit % 8));
      up[i] = static_cast<int8_t>(8 - bit % 8);
    }
  }
};

// 32 codes as bytes.
template <int kBits>
FEWBITS_NEON_INLINE uint8x16x2_t stream_bytes(const uint8_t* at) {
  if constexpr (kBits == 4) {
    const uint8x16x2_t halves_u8x32 = nibbles_by_half(at);
    return {{vzip1q_u8(halves_u8x32.val[0], halves_u8x32.val[1]), vzip2q_u8(halves_u8x32.val[0], halves_u8x32.val[1])}};
  } else {
    static constexpr StreamPlaces<kBits> places;
    const uint8x16_t byte_u8x16 = vld1q_u8(places.byte), next_u8x16 = vld1q_u8(places.next);
    const int8x16_t down_i8x16 = vld1q_s8(places.down), up_i8x16 = vld1q_s8(places.up);
    const auto half = [&](const uint8_t* from) {
      const uint8x16_t stream_u8x16 = load_half_stream<kBits>(from);
      const uint8x16_t low_u8x16 = vshlq_u8(vqtbl1q_u8(stream_u8x16, byte_u8x16), down_i8x16);
      const uint8x16_t high_u8x16 = vshlq_u8(vqtbl1q_u8(stream_u8x16, next_u8x16), up_i8x16);
      return vandq_u8(vorrq_u8(low_u8x16, high_u8x16), vdupq_n_u8((1 << kBits) - 1));
    };
    return {{half(at), half(at + 2 * kBits)}};
  }
}
#endif

}  // namespace fewbits
