// Any number of threads gives the same bytes, and calls from several threads at once, from shares, and ones that throw, end well.
#include <atomic>
#include <stdexcept>
#include <thread>

#include "matmul/activations.h"
#include "matmul/w8a8.h"
#include "platform/threads.h"
#include "weights.h"

namespace fewbits::checks {
namespace {

constexpr size_t kRows = 24, kCols = 1024, kWeights = 300;

template <typename Compute>
void check_same(const std::string& isa, const char* what, const Compute& compute) {
  const std::vector<float> one = compute(1);
  for (const int threads : {2, 7}) {
    const std::vector<float> many = compute(threads);
    if (std::memcmp(one.data(), many.data(), one.size() * sizeof(float)))
      fail("%s %s: %d threads do not give what one gives", isa.c_str(), what, threads);
  }
}

void check_products_by_threads(const std::string& isa) {
  Random random(8);
  std::vector<float> x(kRows * kCols);
  for (float& value : x) value = random.symmetric();
  for (const char* format : {"q4_0", "q4_k", "q6_k", "int4_g128_asym", "int8_channel", "nvfp4"}) {
    const Kernel& kernel = *find_kernel(format, isa.c_str());
    const Weight weight = any_numbers(kernel.layout, kWeights, kCols, 9);
    for (const size_t rows : {size_t{1}, kRows})
      check_same(isa, format, [&](int threads) {
        std::vector<float> out(rows * kWeights);
        multiply(Product{kernel, weight.packed(), nullptr, rows, kCols, kWeights, x.data(), nullptr, out.data()}, threads);
        return out;
      });
  }
}

void check_integers_by_threads(const std::string& isa) {
  Random random(10);
  std::vector<uint8_t> x(kRows * kCols), w(kWeights * kCols);
  random.fill(x.data(), x.size());
  random.fill(w.data(), w.size());
  const std::vector<float> ones(kWeights, 1.0f);
  check_same(isa, "int8 product", [&](int threads) {
    std::vector<float> out(kRows * kWeights);
    multiply_integers(isa.c_str(),
                      {kRows, kCols, kWeights, reinterpret_cast<const int8_t*>(x.data()), ones.data(),
                       reinterpret_cast<const int8_t*>(w.data()), ones.data(), nullptr, out.data()},
                      threads);
    return out;
  });
}

void check_shares() {
  std::vector<int> done(100, 0);
  run_shares(done.size(), [&](size_t i) { ++done[i]; });
  bool thrown = false;
  try {
    run_shares(done.size(), [&](size_t i) {
      ++done[i];
      if (i % 7 == 3) throw std::runtime_error(std::to_string(i));
    });
  } catch (const std::runtime_error& error) {
    thrown = error.what() == std::string("3");
  }
  if (!thrown) fail("run_shares does not throw what the first share threw");
  std::atomic<int> inner = 0;
  run_shares(8, [&](size_t) { run_shares(8, [&](size_t) { ++inner; }); });
  for (const int times : done)
    if (times != 2) fail("run_shares does a share %d times, not twice", times);
  if (inner != 64) fail("run_shares within shares does %d shares, not 64", inner.load());
}

}  // namespace

void check_threads(const std::string& isa) {
  now(isa, "threads");
  check_products_by_threads(isa);
  check_integers_by_threads(isa);
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i)
    callers.emplace_back([&] {
      for (int times = 0; times < 20; ++times) check_shares();
      check_integers_by_threads(isa);
    });
  for (std::thread& caller : callers) caller.join();
}

}  // namespace fewbits::checks
