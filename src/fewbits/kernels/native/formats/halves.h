// float32 to 16 bits, rounded to nearest even: decoding to half precision goes through a row of float32 in the cache.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fewbits {

enum class Half { kFloat16, kBfloat16 };

using ToHalf = void (*)(const float* x, size_t count, uint16_t* out);
ToHalf find_to_half(Half kind, const char* isa);

}  // namespace fewbits
