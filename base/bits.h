// Exact text and fingerprints of numbers, to compare results of processes to
// the bit.
#ifndef BASE_BITS_H_
#define BASE_BITS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

// C's %a: 0.1f is "0x1.99999ap-4". Reading it back gives the same bits, except
// the payload of a NaN ("nan" or "-nan").
std::string HexFloat(float value);
std::string HexFloat(double value);

// Read what HexFloat wrote, and decimal numbers too. InvalidArgument naming the
// text if it is not a number or, for the first, does not fit a float exactly.
absl::StatusOr<float> ParseHexFloat(absl::string_view text);
absl::StatusOr<double> ParseHexDouble(absl::string_view text);

// splitmix64: its state grows by kMixStep, and MixBits makes a number of it. A
// bijection in which each bit of the input flips about half of the output.
inline constexpr uint64_t kMixStep = 0x9E3779B97F4A7C15u;
inline uint64_t MixBits(uint64_t h) {
  h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
  h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
  return h ^ (h >> 31);
}

// 64 bits that depend on every bit of data[0, bytes), the same in every process
// and build (little-endian machines). With h = bytes * kMixStep, each 8-byte
// word w, the last one filled with zeros, does h = MixBits(h ^ w). A step is a
// bijection of w, so buffers that differ in one word never collide. Not for
// adversaries. 2 to 3 GB/s.
uint64_t Fingerprint(const void* data, int64_t bytes);

}  // namespace tessera
#endif  // BASE_BITS_H_
