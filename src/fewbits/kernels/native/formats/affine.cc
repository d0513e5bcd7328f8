// Integers of 2 to 8 bits with a float16 scale per group of columns, per row or for the whole weight, with a zero point or
// without: w = scale * (q - zero). Codes are a bit stream; zero points, one for each scale, another.
#include <string>

#include "formats/bitstream.h"
#include "formats/reader_neon.h"
#include "formats/reader_x86.h"

namespace fewbits {
namespace {

constexpr size_t kWholeRow = 63;  // a reach of more blocks than any row has

size_t groups_of(const Layout& layout, size_t cols) { return layout.reach == kWholeRow ? 1 : cols / 32 >> layout.reach; }

template <int kBits_, bool kWithZero>
struct Shape {
  static constexpr size_t kBlock = 32, kRun = 32, kBlockBytes = 4 * kBits_, kBytes = kBlockBytes;
  static constexpr int kBits = kBits_, kZero = kWithZero && kBits < 8 ? 0 : 1 << (kBits - 1);
  static constexpr bool kOffsets = kWithZero, kZeroPoints = kWithZero;
  static constexpr bool kSigned = kBits == 8 && !kWithZero;  // stored as q, not as q + 128
  const uint8_t *codes, *scale_at, *zeros;
  size_t group;

  Shape(const Layout& layout, RowOf parts, size_t b) : Shape(layout, parts, b, parts[0] + b * kBlockBytes) {}
  Shape(const Layout& layout, RowOf parts, size_t b, const uint8_t* codes)
      : codes(codes), zeros(parts[2]), group(b >> layout.reach) {
    scale_at = parts[1] + 2 * group;
  }

  const void* address() const { return codes; }

  float offset_of(float scale) const {
    // 8-bit codes are multiplied as signed bytes; all of this is exact in float32, and never -0
    if constexpr (kBits == 8) return scale * static_cast<float>(128 - zeros[group]) + 0.0f;
    return -scale * static_cast<float>(stream_code<kBits>(zeros, group));
  }
};

template <int kBits, bool kWithZero>
struct Scalar : Shape<kBits, kWithZero> {
  using Shape<kBits, kWithZero>::Shape;

  void scales(float* scale, float* offset) const {
    *scale = float16_at(this->scale_at);
    if constexpr (kWithZero) *offset = this->offset_of(*scale);
  }

  uint8_t byte(size_t j) const {
    if constexpr (kBits == 8) return this->kSigned ? this->codes[j] ^ 0x80 : this->codes[j];
    return stream_code<kBits>(this->codes, j);
  }
};

#if defined(__x86_64__)
template <int kBits, bool kWithZero>
struct Avx2 : Shape<kBits, kWithZero> {
  using Shape<kBits, kWithZero>::Shape;

  FEWBITS_AVX2_INLINE void scales(float* scale, float* offset) const {
    *scale = float16_at_avx2(this->scale_at);
    if constexpr (kWithZero) *offset = this->offset_of(*scale);
  }

  FEWBITS_AVX2_INLINE void scale_lanes(__m256& scale, __m256& offset) const {
    scale = float16_lanes(this->scale_at);
    if constexpr (kWithZero) offset = _mm256_set1_ps(this->offset_of(_mm256_cvtss_f32(scale)));
  }

  FEWBITS_AVX2_INLINE __m256i bytes(size_t) const {
    if constexpr (kBits != 8) return stream_bytes<kBits>(this->codes);
    const __m256i stored_x32 = load_32(this->codes);
    return this->kSigned ? _mm256_xor_si256(stored_x32, _mm256_set1_epi8(static_cast<char>(0x80))) : stored_x32;
  }
};
template <int kBits, bool kWithZero>
using IntegerReaders = Readers<Scalar<kBits, kWithZero>, Avx2<kBits, kWithZero>>;
#elif defined(__aarch64__)
template <int kBits, bool kWithZero>
struct Neon : Shape<kBits, kWithZero> {
  using Shape<kBits, kWithZero>::Shape;

  FEWBITS_NEON_INLINE void scales(float* scale, float* offset) const {
    *scale = float16_at_neon(this->scale_at);
    if constexpr (kWithZero) *offset = this->offset_of(*scale);
  }

  FEWBITS_NEON_INLINE uint8x16x2_t bytes(size_t) const {
    if constexpr (kBits != 8) return stream_bytes<kBits>(this->codes);
    const uint8x16x2_t stored_x32 = load_32(this->codes);
    const uint8x16_t sign_u8x16 = vdupq_n_u8(this->kSigned ? 0x80 : 0);
    return {{veorq_u8(stored_x32.val[0], sign_u8x16), veorq_u8(stored_x32.val[1], sign_u8x16)}};
  }
};
template <int kBits, bool kWithZero>
using IntegerReaders = Readers<Scalar<kBits, kWithZero>, Neon<kBits, kWithZero>>;
#else
template <int kBits, bool kWithZero>
using IntegerReaders = Readers<Scalar<kBits, kWithZero>>;
#endif

template <int kBits, bool kWithZero>
void pack(const Layout& layout, const uint8_t* codes, RowOf grid, size_t cols, RowInto parts) {
  const size_t groups = groups_of(layout, cols);
  if constexpr (kBits == 8)
    for (size_t i = 0; i < cols; ++i) parts[0][i] = kWithZero ? codes[i] : codes[i] ^ 0x80;  // code 0 is level -128
  else
    pack_stream<kBits>(codes, cols, parts[0]);
  std::memcpy(parts[1], grid[0], 2 * groups);
  if constexpr (kWithZero && kBits == 8)
    std::memcpy(parts[2], grid[1], groups);
  else if constexpr (kWithZero)
    pack_stream<kBits>(grid[1], groups, parts[2]);
}

// A scale covers 32, 64, 128 columns, a row or the weight: each is a format, and the same readers serve them.
template <int kBits, bool kWithZero>
struct Family {
  struct Member {
    std::string name;
    Layout layout;
    IntegerReaders<kBits, kWithZero> readers;

    Member(const std::string& scope, size_t reach)
        : name("int" + std::to_string(kBits) + "_" + scope + (kWithZero ? "_asym" : "")),
          layout(laid_out(name.c_str(), reach)),
          // a scale of the whole weight is written once, not by each row
          readers(layout, scope == "tensor" ? nullptr : pack<kBits, kWithZero>) {}
  };
  Member g32{"g32", 0}, g64{"g64", 1}, g128{"g128", 2}, channel{"channel", kWholeRow}, tensor{"tensor", kWholeRow};

  static Layout laid_out(const char* name, size_t reach) {
    constexpr size_t kWholeBytes = kBits == 8 ? 1 : kBits == 4 ? 2 : kBits % 2 ? 8 : 4;  // columns that fill whole bytes
    const bool grouped = reach != kWholeRow;
    const size_t block = grouped ? 32u << reach : kWholeBytes;
    const Field codes{"codes", block * kBits / 8}, scales{"scales", grouped ? 2u : 0u, grouped ? 0u : 2u};
    Layout layout{name, block, {codes, scales}, {scales}, reach};
    if (kWithZero) {
      layout.parts[2] = {"zeros", 0, grouped ? 0u : 1u, grouped ? kBits : 0u};
      layout.grid[1] = {"zeros", grouped ? 1u : 0u, grouped ? 0u : 1u};
    }
    return layout;
  }
};

Family<2, false> int2;
Family<3, false> int3;
Family<4, false> int4;
Family<5, false> int5;
Family<6, false> int6;
Family<8, false> int8;
Family<2, true> int2_asym;
Family<3, true> int3_asym;
Family<4, true> int4_asym;
Family<5, true> int5_asym;
Family<6, true> int6_asym;
Family<8, true> int8_asym;

}  // namespace
}  // namespace fewbits
