// Numbers by which ranks see that they run the same program: the same on all of
// them, whatever built them (FNV-1a).
#ifndef PARALLEL_PIPELINE_PROGRAM_PRINT_H_
#define PARALLEL_PIPELINE_PROGRAM_PRINT_H_

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

inline constexpr uint64_t kPrintPrime = 0x100000001b3;
inline constexpr uint64_t kPrintBasis = 0xcbf29ce484222325;

inline uint64_t PrintOf(const std::string& text) {
  uint64_t print = kPrintBasis;
  for (const char c : text) {
    print = (print ^ static_cast<unsigned char>(c)) * kPrintPrime;
  }
  return print;
}

inline uint64_t PrintOfWords(const std::vector<uint64_t>& words) {
  uint64_t print = kPrintBasis;
  for (const uint64_t word : words) {
    for (int byte = 0; byte < 8; ++byte) {
      print = (print ^ (word >> (8 * byte) & 0xff)) * kPrintPrime;
    }
  }
  return print;
}

}  // namespace tessera
#endif  // PARALLEL_PIPELINE_PROGRAM_PRINT_H_
