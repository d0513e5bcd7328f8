// Work in shares, done by threads that stay. What a share computes must not depend on how many there are, nor on who does it.
//
// Starting a thread takes 20 to 50 us, more than many a kernel runs. So the threads that a call started wait for the next one:
// they spin for a while, which costs the next call less than a microsecond, and then sleep.
#pragma once

#include <algorithm>
#include <cstddef>

namespace fewbits {

// As many as asked for, but no more than there is work for.
inline size_t shares_of(int threads, size_t most) {
  return std::clamp<size_t>(threads < 1 ? 1 : static_cast<size_t>(threads), 1, std::max<size_t>(1, most));
}

using ShareCall = void (*)(const void* work, size_t share);
void run_on_pool(size_t shares, ShareCall call, const void* work);  // threads.cc

// Calls share(0), ..., share(shares - 1), each once, share(0) in this thread and the others in this one or in any other; returns
// when all are done. If shares throw, the others are done nevertheless, and what the first of them threw is thrown here.
//
// One call at a time has the pool. Whoever calls meanwhile (another thread, or a share itself) does its own shares one by one:
// the processors are taken then, and further threads would only take turns with those that work.
template <typename Share>
void run_shares(size_t shares, const Share& share) {
  if (shares <= 1) return share(0);
  run_on_pool(shares, [](const void* work, size_t i) { (*static_cast<const Share*>(work))(i); }, &share);
}

}  // namespace fewbits
