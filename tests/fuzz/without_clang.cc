// libFuzzer's place where there is none: seeds from files, changed at random, the same every time. Not guided by coverage.
//
//     without_clang EXECUTIONS SEED...
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int count, char** words) {
  std::vector<std::vector<uint8_t>> seeds;
  for (int i = 2; i < count; ++i) {
    std::ifstream file(words[i], std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  if (seeds.empty()) return 2;
  std::mt19937 random(0);
  const long executions = std::atol(words[1]);
  for (long n = 0; n < executions; ++n) {
    std::vector<uint8_t> input = seeds[n % seeds.size()];
    input.resize(3 + random() % 1024, static_cast<uint8_t>(random()));
    for (int byte = 0; byte < 3; ++byte) input[byte] = static_cast<uint8_t>(random());  // format, width, rows
    for (unsigned changes = random() % 64; changes; --changes) input[random() % input.size()] = static_cast<uint8_t>(random());
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%ld executions\n", executions);
}
