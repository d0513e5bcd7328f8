// Products of one row of activations with weights that are floats: float32, float16 or bfloat16, summed in float32.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fewbits {

enum class Dense : uint8_t { kFloat32, kFloat16, kBfloat16 };

constexpr size_t dense_bytes(Dense kind) { return kind == Dense::kFloat32 ? 4 : 2; }

using DotDense = float (*)(const uint8_t* w, const float* x, size_t n);
DotDense find_dot_dense(Dense kind, const char* isa = nullptr);  // null: the fastest that runs here

}  // namespace fewbits
