// Work in equal shares, one thread each. What a share computes must not depend on how many there are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace fewbits {

// As many as asked for, but no more than there is work for.
inline size_t shares_of(int threads, size_t most) {
  return std::clamp<size_t>(threads < 1 ? 1 : static_cast<size_t>(threads), 1, std::max<size_t>(1, most));
}

template <typename Share>
void run_shares(size_t shares, const Share& share) {
  std::vector<std::thread> others;
  others.reserve(shares);
  size_t started = 1;
  try {
    for (; started < shares; ++started) others.emplace_back(share, started);
  } catch (const std::system_error&) {  // the system gives no more threads: the rest is done here
  }
  share(0);
  for (size_t i = started; i < shares; ++i) share(i);
  for (std::thread& other : others) other.join();
}

}  // namespace fewbits
