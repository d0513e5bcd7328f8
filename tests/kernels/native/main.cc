// Every kernel of the table against slow twins, and searches against scalar ones, without Python: for instruction sets that only
// an emulator runs, and for sanitizers.
//
//     kernels_check [threads] [dotprod | no-dotprod] [digest-into FILE | digest-from FILE]
//
// `threads` checks what threads share, and nothing else. `dotprod` and `no-dotprod` say which of NEON's two ways must be taken.
// The digest is of what the scalar kernels pack, decode and find: written on one processor, it is compared on another.
#include <algorithm>
#include <csignal>
#include <fstream>

#include "checks.h"
#include "kernels.h"
#include "platform/neon.h"
#include "weights.h"

namespace fewbits::checks {
namespace {

std::vector<std::string> instruction_sets() {  // those that run here
  std::vector<std::string> found;
  for (const Kernel* kernel = first_kernel(); kernel; kernel = kernel->next)
    if (kernel->runs_here() && std::find(found.begin(), found.end(), kernel->isa) == found.end()) found.push_back(kernel->isa);
  return found;
}

[[noreturn, maybe_unused]] void say_where(int) { fail("%s leaves its arrays", current); }

void check_processor(bool dotprod, bool no_dotprod) {
  bool found = false;
#if defined(__aarch64__)
  found = has_dotprod();
#endif
  if (dotprod && !found) fail("this processor has no products of four bytes");
  if (no_dotprod && found) fail("this processor has products of four bytes");
}

void compare_digest(const Digest& digest, const std::string& file) {
  uint64_t expected = 0;
  if (!(std::ifstream(file) >> expected)) fail("there is no digest in %s", file.c_str());
  if (digest.value() != expected) fail("the scalar kernels do not pack, decode and search as on the other processor");
}

}  // namespace
}  // namespace fewbits::checks

int main(int count, char** words) {
  using namespace fewbits::checks;
  const std::vector<std::string> asked(words + 1, words + count);
  const auto find = [&](const char* word) { return std::find(asked.begin(), asked.end(), word); };
  const auto has = [&](const char* word) { return find(word) != asked.end(); };
  check_processor(has("dotprod"), has("no-dotprod"));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they say more
  std::signal(SIGSEGV, say_where);
#endif
  Digest digest;
  give_grids();
  if (!has("threads")) {
    check_packing(digest);
    check_search(digest);
  }
  for (const std::string& isa : instruction_sets()) {
    check_threads(isa);
    if (has("threads")) continue;
    check_decoding(isa, digest);
    check_activations(isa);
    check_products(isa);
    check_integer_products(isa);
  }
  if (has("digest-into")) std::ofstream(find("digest-into")[1]) << digest.value() << '\n';
  if (has("digest-from")) compare_digest(digest, find("digest-from")[1]);
  std::puts("passed");
}
