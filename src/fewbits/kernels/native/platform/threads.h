// Work in shares, done by a pool of threads. What a share computes must not depend on the number of shares or on the thread.
//
// Starting a thread takes 20 to 50 us, longer than many kernels run. So the threads of a call wait for the next one: first they
// spin, so that a call soon after costs less than a microsecond, then they sleep.
#pragma once

#include <algorithm>
#include <cstddef>

namespace fewbits {

// As many as asked for, but no more than the work is worth.
inline size_t shares_of(int threads, size_t most) {
  return std::clamp<size_t>(threads < 1 ? 1 : static_cast<size_t>(threads), 1, std::max<size_t>(1, most));
}

using ShareCall = void (*)(const void* work, size_t share);
void run_on_pool(size_t shares, ShareCall call, const void* work);  // threads.cc

// Calls share(0), ..., share(shares - 1), each once, share(0) in this thread and the others in this one or in any other; returns
// when all are done. If shares throw, the others are still done, and the exception of the first of them is rethrown here.
//
// One call at a time has the pool. A call made meanwhile (by another thread, or by a share itself) does its shares one by one in
// its own thread: the processors are busy, and more threads would only compete for them.
template <typename Share>
void run_shares(size_t shares, const Share& share) {
  if (shares <= 1) return share(0);
  run_on_pool(shares, [](const void* work, size_t i) { (*static_cast<const Share*>(work))(i); }, &share);
}

}  // namespace fewbits
