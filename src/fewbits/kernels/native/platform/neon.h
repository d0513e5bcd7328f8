// What the NEON kernels share. Every AArch64 processor has NEON; whether it has products of four bytes (FEAT_DotProd) is checked
// when the program starts, and functions that use them are compiled for them one by one.
//
// None of this has been timed: it is tested in an emulator (`make test-neon`), which says nothing about speed.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif

#include "kernels.h"

#if defined(__clang__)
#define FEWBITS_DOTPROD __attribute__((target("dotprod")))
#else
#define FEWBITS_DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))  // GCC inlines its intrinsics only into this
#endif
#define FEWBITS_NEON_INLINE inline __attribute__((always_inline))

namespace fewbits {

inline bool has_dotprod() {
#if defined(__ARM_FEATURE_DOTPROD)
  return true;
#elif defined(__linux__)
  constexpr unsigned long kDotProd = 1 << 20;  // HWCAP_ASIMDDP, which older systems' headers do not name
  return getauxval(AT_HWCAP) & kDotProd;
#else
  return false;
#endif
}

// Each lane of `sum` gets four products of signed bytes.
namespace neon_dotprod {
FEWBITS_DOTPROD FEWBITS_NEON_INLINE int32x4_t add_dot(int32x4_t sum_i32x4, int8x16_t w_i8x16, int8x16_t x_i8x16) {
  return vdotq_s32(sum_i32x4, w_i8x16, x_i8x16);
}
}  // namespace neon_dotprod

// The same for |x| <= 127: two products, of at most 127 * 128 each, fit 16 bits.
namespace neon_plain {
FEWBITS_NEON_INLINE int32x4_t add_dot(int32x4_t sum_i32x4, int8x16_t w_i8x16, int8x16_t x_i8x16) {
  const int16x8_t low_i16x8 = vmull_s8(vget_low_s8(w_i8x16), vget_low_s8(x_i8x16)), high_i16x8 = vmull_high_s8(w_i8x16, x_i8x16);
  return vpadalq_s16(sum_i32x4, vpaddq_s16(low_i16x8, high_i16x8));
}
}  // namespace neon_plain

// The same for every x: pairs are added in 32 bits.
namespace neon_wide {
FEWBITS_NEON_INLINE int32x4_t add_dot(int32x4_t sum_i32x4, int8x16_t w_i8x16, int8x16_t x_i8x16) {
  const int16x8_t low_i16x8 = vmull_s8(vget_low_s8(w_i8x16), vget_low_s8(x_i8x16)), high_i16x8 = vmull_high_s8(w_i8x16, x_i8x16);
  return vaddq_s32(sum_i32x4, vpaddq_s32(vpaddlq_s16(low_i16x8), vpaddlq_s16(high_i16x8)));
}
}  // namespace neon_wide

// Four bytes, in all lanes.
FEWBITS_NEON_INLINE int8x16_t four_lanes(const int8_t* at) {
  int32_t four;
  std::memcpy(&four, at, sizeof four);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

FEWBITS_NEON_INLINE float float16_at_neon(const uint8_t* at) { return static_cast<float>(load<__fp16>(at)); }

FEWBITS_NEON_INLINE uint8x16x2_t load_32(const uint8_t* at) { return {{vld1q_u8(at), vld1q_u8(at + 16)}}; }

FEWBITS_NEON_INLINE uint8x16x2_t either(uint8x16x2_t a_u8x32, uint8x16x2_t b_u8x32) {
  return {{vorrq_u8(a_u8x32.val[0], b_u8x32.val[0]), vorrq_u8(a_u8x32.val[1], b_u8x32.val[1])}};
}

// Low nibbles of 16 bytes, then their high ones.
FEWBITS_NEON_INLINE uint8x16x2_t nibbles_by_half(const uint8_t* at) {
  const uint8x16_t both_u8x16 = vld1q_u8(at);
  return {{vandq_u8(both_u8x16, vdupq_n_u8(15)), vshrq_n_u8(both_u8x16, 4)}};
}

// Bits `from` and up of each byte, `count` of them, moved to bit `to`.
FEWBITS_NEON_INLINE uint8x16x2_t bits_of(uint8x16x2_t bytes_u8x32, int from, int count, int to) {
  const int8x16_t left_i8x16 = vdupq_n_s8(static_cast<int8_t>(to - from));  // negative: to the right
  const uint8x16_t mask_u8x16 = vdupq_n_u8(static_cast<uint8_t>(((1 << count) - 1) << to));
  return {{vandq_u8(vshlq_u8(bytes_u8x32.val[0], left_i8x16), mask_u8x16),
           vandq_u8(vshlq_u8(bytes_u8x32.val[1], left_i8x16), mask_u8x16)}};
}

// Bit j of `bits` in byte j: `value` where it is set.
FEWBITS_NEON_INLINE uint8x16x2_t spread_bits(uint32_t bits, uint8_t value) {
  const uint8x16_t bit_u8x16 = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201)), value_u8x16 = vdupq_n_u8(value);
  const auto eight = [&](uint32_t shift) { return vdup_n_u8(static_cast<uint8_t>(bits >> shift)); };
  return {{vandq_u8(vtstq_u8(vcombine_u8(eight(0), eight(8)), bit_u8x16), value_u8x16),
           vandq_u8(vtstq_u8(vcombine_u8(eight(16), eight(24)), bit_u8x16), value_u8x16)}};
}

FEWBITS_NEON_INLINE uint8x16x2_t look_up(const uint8_t* table_of_16, uint8x16x2_t index_u8x32) {
  const uint8x16_t table_u8x16 = vld1q_u8(table_of_16);
  return {{vqtbl1q_u8(table_u8x16, index_u8x32.val[0]), vqtbl1q_u8(table_u8x16, index_u8x32.val[1])}};
}

struct Floats16 {
  float32x4_t of[4];
};

FEWBITS_NEON_INLINE Floats16 to_floats(int8x16_t q_i8x16) {
  const int16x8_t low_i16x8 = vmovl_s8(vget_low_s8(q_i8x16)), high_i16x8 = vmovl_high_s8(q_i8x16);
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low_i16x8))), vcvtq_f32_s32(vmovl_high_s16(low_i16x8)),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high_i16x8))), vcvtq_f32_s32(vmovl_high_s16(high_i16x8))}};
}

// out[0..15] = factor * the signed bytes
FEWBITS_NEON_INLINE void scale_16(int8x16_t q_i8x16, float factor, float* out) {
  const Floats16 q = to_floats(q_i8x16);
  for (size_t i = 0; i < 4; ++i) vst1q_f32(out + 4 * i, vmulq_n_f32(q.of[i], factor));
}

// out[0..7] = factor * the signed bytes
FEWBITS_NEON_INLINE void scale_8(uint64_t q_i8x8, float factor, float* out) {
  const int16x8_t wide_i16x8 = vmovl_s8(vcreate_s8(q_i8x8));
  vst1q_f32(out, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide_i16x8))), factor));
  vst1q_f32(out + 4, vmulq_n_f32(vcvtq_f32_s32(vmovl_high_s16(wide_i16x8)), factor));
}

}  // namespace fewbits
#endif
