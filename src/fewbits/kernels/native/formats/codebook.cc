#include "formats/codebook.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace fewbits {
namespace {

constinit Codebook* first = nullptr;  // constinit: set before any constructor runs

}  // namespace

Codebook::Codebook(const char* format, size_t points, size_t dims, int zero, float unit, Signs signs)
    : format(format), points(points), dims(dims), zero(zero), unit(unit), signs(signs), next(first) {
  first = this;
}

void Codebook::give(const int8_t* coordinates) {
  if (given) return;
  const size_t count = points * dims, half = dims / 2;
  bool used[256] = {};
  for (size_t i = 0; i < count; ++i) {
    if (std::abs(coordinates[i]) * (shifts() ? 8 : 1) + shifts() > zero)
      throw std::invalid_argument("a value beyond those of " + std::string(format));
    bytes[i] = static_cast<uint8_t>(shifts() ? zero + 8 * coordinates[i] : coordinates[i]);
    used[bytes[i]] = true;
  }
  uint8_t code_of[256] = {}, level_of[8] = {};
  size_t codes_used = 0;
  for (size_t byte = 0; byte < 256; ++byte)
    if (used[byte]) {
      if (codes_used == size_t{1} << code_bits())
        throw std::invalid_argument("too many values in the grid of " + std::string(format));
      code_of[byte] = static_cast<uint8_t>(codes_used);
      level_of[codes_used++] = static_cast<uint8_t>(byte);
    }
  for (size_t i = 0; i < count; ++i)
    codes[i % dims / half][i / dims] |= static_cast<uint8_t>(code_of[bytes[i]] << (i % half * static_cast<size_t>(code_bits())));
  for (size_t i = 0; i < 64; ++i) {
    const int byte = level_of[i % (size_t{1} << code_bits())];
    const bool negative = i >> code_bits() & 1;
    levels[i] = static_cast<uint8_t>((shifts() ? byte : zero) + (negative ? -1 : 1) * (shifts() ? 1 : byte));
  }
  given = true;
}

Codebook* find_codebook(const char* format) {
  for (Codebook* codebook = first; codebook; codebook = codebook->next)
    if (!std::strcmp(codebook->format, format)) return codebook;
  return nullptr;
}

void require_grid(const char* format) {
  const Codebook* const codebook = find_codebook(format);
  if (codebook && !codebook->given) throw std::invalid_argument(std::string("the grid of ") + format + " was not given");
}

}  // namespace fewbits
