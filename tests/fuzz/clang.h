// Clang 14 knows fewer names of processor features than GCC does; this asks the kernel instead. Included before everything else.
#pragma once

#include <fstream>
#include <string>

inline bool fewbits_fuzz_supports(std::string name) {
  static const std::string flags = [] {
    std::ifstream file("/proc/cpuinfo");
    std::string line, found;
    while (std::getline(file, line))
      if (line.rfind("flags", 0) == 0) break;
    for (const char letter : line)
      if (letter != '_') found += letter;
    return found + ' ';
  }();
  return flags.find(' ' + name + ' ') != std::string::npos;
}

#define __builtin_cpu_supports(name) fewbits_fuzz_supports(name)
