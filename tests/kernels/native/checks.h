// What the checks share: a way to fail, random numbers that are the same everywhere, and memory that must not be left.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace fewbits::checks {

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  std::fputs("FAILED: ", stdout);
  std::vprintf(format, values);
  std::puts("");
  std::fflush(stdout);
  std::_Exit(1);
}

// What is being checked, for who touches memory that it must not: main.cc prints it.
inline char current[128];
inline void now(const std::string& isa, const char* what) { std::snprintf(current, sizeof current, "%s %s", isa.c_str(), what); }

class Random {  // splitmix64
 public:
  explicit Random(uint64_t seed) : state(seed) {}
  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  size_t below(size_t n) { return next() % n; }
  float symmetric() { return static_cast<float>(static_cast<int64_t>(next() >> 40) - (1 << 23)) * 0x1p-23f; }  // [-1, 1)
  void fill(uint8_t* bytes, size_t count) {
    for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(next() >> 32);
  }

 private:
  uint64_t state;
};

// Ends where a page ends and the next may not be touched: what reads or writes beyond dies at once, in an emulator too.
template <typename T>
class Guarded {
 public:
  explicit Guarded(size_t count) : count(count) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), bytes = count * sizeof(T);
    area_bytes = (bytes + page - 1) / page * page + page;
    area = static_cast<uint8_t*>(mmap(nullptr, area_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (area == MAP_FAILED || mprotect(area + area_bytes - page, page, PROT_NONE)) fail("no memory for %zu bytes", bytes);
    first = reinterpret_cast<T*>(area + area_bytes - page - bytes);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  Guarded(Guarded&& other) noexcept : first(other.first), count(other.count), area(other.area), area_bytes(other.area_bytes) {
    other.area = nullptr;
  }
  ~Guarded() {
    if (area) munmap(area, area_bytes);
  }

  T* data() { return first; }
  const T* data() const { return first; }
  size_t size() const { return count; }
  T& operator[](size_t i) { return first[i]; }
  const T& operator[](size_t i) const { return first[i]; }

 private:
  T* first;
  size_t count;
  uint8_t* area;
  size_t area_bytes;
};

// Of all that must be the same on every processor.
class Digest {
 public:
  void add(const void* bytes, size_t count) {
    for (size_t i = 0; i < count; ++i) hash = (hash ^ static_cast<const uint8_t*>(bytes)[i]) * 0x100000001b3;
  }
  uint64_t value() const { return hash; }

 private:
  uint64_t hash = 0xcbf29ce484222325;
};

void check_packing(Digest& digest);
void check_search(Digest& digest);
void check_decoding(const std::string& isa, Digest& digest);
void check_activations(const std::string& isa);
void check_products(const std::string& isa);
void check_integer_products(const std::string& isa);
void check_threads(const std::string& isa);

}  // namespace fewbits::checks
