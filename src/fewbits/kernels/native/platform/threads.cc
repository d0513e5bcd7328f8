// The pool behind run_shares.
//
// A counter hands out a job's shares one by one, to the workers and to the caller alike. So a worker that wakes late, or not at
// all because other programs use the processors, delays nobody: the caller does its share.
//
// Everything here is static and has no destructor, because workers may still sleep on it when the program ends. They are detached
// for the same reason, and because a forked child has none of them to join.
#include "platform/threads.h"

#include <atomic>
#include <cfenv>
#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fewbits {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);  // about what it takes to wake a thread
constexpr size_t kMostWorkers = 255;
constexpr uint32_t kMostShares = 0xffff;

// How this thread rounds and whether it flushes subnormals. A new thread would inherit that, so a worker adopts it.
#if defined(__x86_64__)
using FloatModes = unsigned;
FloatModes float_modes() { return _mm_getcsr(); }
void set_float_modes(FloatModes modes) { _mm_setcsr(modes); }
void pause() { _mm_pause(); }
#else
using FloatModes = std::fenv_t;
FloatModes float_modes() {
  FloatModes modes;
  std::fegetenv(&modes);
  return modes;
}
void set_float_modes(const FloatModes& modes) { std::fesetenv(&modes); }
void pause() {
#if defined(__aarch64__)
  asm volatile("yield");
#endif
}
#endif

// What the caller of run_shares waits for; it is on the caller's stack.
struct Job {
  ShareCall call;
  const void* work;
  FloatModes modes;
  std::mutex guard{};  // guards the two below
  std::exception_ptr thrown{};
  size_t thrower = 0;

  void run(size_t share) noexcept {
    try {
      call(work, share);
    } catch (...) {
      const std::lock_guard held(guard);
      if (thrown && thrower < share) return;
      thrown = std::current_exception();
      thrower = share;
    }
  }
};

struct Pool {
  std::atomic<bool> taken = false;
  size_t workers = 0;                    // this and the job belong to the caller that has taken the pool
  Job* job = nullptr;                    // only holders of one of its shares read it, and the job waits for them
  std::atomic<uint32_t> handed_out = 0;  // shares of the job in the upper half, how many of them are handed out in the lower
  std::atomic<uint32_t> unfinished = 0;  // shares of the job
};

constinit Pool pool;

constexpr bool any_left(uint32_t handed_out) { return (handed_out & kMostShares) < handed_out >> 16; }

// Takes a share of the current job, which the caller must then do; false if none is left.
bool take_share(uint32_t& share) {
  uint32_t seen = pool.handed_out.load();
  while (any_left(seen))
    if (pool.handed_out.compare_exchange_weak(seen, seen + 1)) {
      share = seen & kMostShares;
      return true;
    }
  return false;
}

template <typename Condition>
bool spin_until(const Condition& holds) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (holds()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

void finish_share() {
  if (pool.unfinished.fetch_sub(1) == 1) pool.unfinished.notify_one();
}

void work_forever() {
  for (;;) {
    for (uint32_t share; take_share(share);) {
      set_float_modes(pool.job->modes);
      pool.job->run(share);
      finish_share();
    }
    if (spin_until([] { return any_left(pool.handed_out.load(std::memory_order_relaxed)); })) continue;
    const uint32_t seen = pool.handed_out.load();
    if (!any_left(seen)) pool.handed_out.wait(seen);
  }
}

void await_all() {
  const auto done = [] { return pool.unfinished.load() == 0; };
  if (spin_until(done)) return;
  for (uint32_t left; (left = pool.unfinished.load()) != 0;) pool.unfinished.wait(left);
}

// In a child after fork, which has neither the parent's workers nor the thread that had taken the pool.
void forget_workers() {
  pool.workers = 0;
  pool.handed_out = 0;
  pool.unfinished = 0;
  pool.taken = false;
}

void add_workers(size_t wanted) {
#if defined(__unix__) || defined(__APPLE__)
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, forget_workers);
#endif
  try {
    for (; pool.workers < std::min(wanted, kMostWorkers); ++pool.workers) std::thread(work_forever).detach();
  } catch (const std::system_error&) {  // the system gives no more threads: the existing ones do all the work
  }
}

void run_with_workers(uint32_t shares, Job& job) {
  add_workers(shares - 1);
  pool.job = &job;
  pool.unfinished = shares;
  pool.handed_out = shares << 16 | 1;                                                     // this thread does the first share
  for (size_t i = 1; i < shares && i <= pool.workers; ++i) pool.handed_out.notify_one();  // a system call only if a worker sleeps
  uint32_t share = 0;
  do {
    job.run(share);
    finish_share();
  } while (take_share(share));
  await_all();
}

}  // namespace

void run_on_pool(size_t shares, ShareCall call, const void* work) {
  Job job{call, work, float_modes()};
  if (shares <= kMostShares && !pool.taken.exchange(true)) {
    run_with_workers(static_cast<uint32_t>(shares), job);
    pool.taken = false;
  } else {
    for (size_t i = 0; i < shares; ++i) job.run(i);
  }
  if (job.thrown) std::rethrow_exception(job.thrown);
}

}  // namespace fewbits
