// Which searches run here, by the name of their instruction set.
#include <stdexcept>

#include "platform/avx512.h"
#include "search/product.h"
#include "search/quantize.h"
#include "search/vectors.h"

namespace fewbits {

const quantize::Searches& quantize::find_searches(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512" && has_avx512()) return avx512_searches;
  if (isa == "avx2" && has_avx2()) return avx2_searches;
#endif
  if (isa == "scalar") return scalar_searches;
  throw std::invalid_argument("no " + isa + " kernel searches for scales here");
}

const vectors::Searches& vectors::find_searches(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512" && has_avx512()) return avx512_searches;
  if (isa == "avx2" && has_avx2()) return avx2_searches;
#endif
  if (isa == "scalar") return scalar_searches;
  throw std::invalid_argument("no " + isa + " kernel knows codes of vectors here");
}

Multiply find_multiply(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512" && has_avx512()) return avx512_multiply;
  if (isa == "avx2" && has_avx2()) return avx2_multiply;
#endif
  if (isa == "scalar") return scalar_multiply;
  throw std::invalid_argument("no " + isa + " kernel multiplies here");
}

std::vector<std::string> quantize::search_isas() {
  std::vector<std::string> found;
  for (const char* isa : {"avx512", "avx2", "scalar"}) {
    try {
      find_searches(isa);
      found.emplace_back(isa);
    } catch (const std::invalid_argument&) {
    }
  }
  return found;
}

}  // namespace fewbits
