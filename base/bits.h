// Writes numbers as exact text and makes fingerprints of bytes, so that the
// results of processes can be compared to the bit.
#ifndef BASE_BITS_H_
#define BASE_BITS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

// Writes a number as C's %a does: 0.1f is "0x1.99999ap-4". Reading it back
// gives the same bits, except for the payload of a NaN ("nan" or "-nan").
std::string HexFloat(double value);

// Reads what HexFloat wrote, and decimal numbers. Returns InvalidArgument
// naming the text if it is not a number.
absl::StatusOr<double> ParseHexDouble(absl::string_view text);

// MixBits and kMixStep are splitmix64: the state grows by kMixStep, and MixBits
// turns it into a number. MixBits is a bijection in which each bit of the input
// flips about half of the output.
inline constexpr uint64_t kMixStep = 0x9E3779B97F4A7C15u;
inline uint64_t MixBits(uint64_t h) {
  h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
  h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
  return h ^ (h >> 31);
}

// Returns 64 bits that depend on every bit of data[0, bytes) and are identical
// in every process and build (on little-endian machines). It starts with h =
// bytes * kMixStep; each 8-byte word w, the last one padded with zeros, does h
// = MixBits(h ^ w). A step is a bijection of w, so buffers that differ in one
// word never collide. It does not withstand adversaries. It runs at 2 to 3
// GB/s.
uint64_t Fingerprint(const void* data, int64_t bytes);

}  // namespace tessera
#endif  // BASE_BITS_H_
