// Makes random bits, and rounds by them, as oracle_step.h defines it. For
// oracle_step.cc alone.
#ifndef VERIFY_ORACLE_ROUNDING_H_
#define VERIFY_ORACLE_ROUNDING_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "verify/oracle_formulas.h"

namespace tessera::oracle {

inline uint64_t Mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  x ^= x >> 31;
  return x;
}

inline uint64_t SeedOfStep(int64_t parameter, int64_t step) {
  const uint64_t of_parameter =
      Mix(static_cast<uint64_t>(parameter) + 0x9e3779b97f4a7c15u);
  return Mix(of_parameter ^ static_cast<uint64_t>(step));
}

// The upper half of a number above 2^32 changes the seed's upper half.
inline uint32_t RandomOf(uint64_t seed, int64_t number) {
  const auto lower = static_cast<uint32_t>(number);
  const auto upper = static_cast<uint32_t>(number >> 32);
  uint32_t x = lower;
  x *= 0x9e3779b9u;
  x += static_cast<uint32_t>(seed);
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x ^= static_cast<uint32_t>(seed >> 32);
  x ^= upper * 0x85ebca6bu;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

// Rounds to a value of bfloat16; `random` has 16 bits.
inline float RoundedRandomly(float x, uint32_t random) {
  if (std::isnan(x)) return OneNan(x);
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t lost = bits & 0xffff;
  bits -= lost;
  if (lost + random > 0xffff) bits += 0x10000;
  std::memcpy(&x, &bits, sizeof(bits));
  return x;
}
inline double RoundedRandomly(double x, uint32_t) { return x; }  // never called

// Rounds to a value of bfloat16, half away from zero: what is half a unit or
// more above the lower neighbour, in magnitude, goes up.
inline float RoundedTiesAway(float x) {
  if (std::isnan(x)) return OneNan(x);
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t lost = bits & 0xffff;
  bits -= lost;
  if (lost >= 0x8000) bits += 0x10000;
  std::memcpy(&x, &bits, sizeof(bits));
  return x;
}

// Rounds to a value of float16, a multiple of the unit there. The lost part has
// as many bits in float32 as the unit is larger than x's last bit.
inline float RoundedRandomlyToHalf(float x, uint32_t random) {
  if (std::isnan(x) || std::isinf(x) || x == 0) return OneNan(x);
  const int exponent = std::max(std::ilogb(x), -14);
  const int bits = exponent - 10 - (std::ilogb(x) - 23);
  if (bits > 31) return std::copysign(0.0f, x);
  const double units =
      std::ldexp(std::abs(static_cast<double>(x)), 10 - exponent);
  const double lost = std::ldexp(units - std::floor(units), bits);
  const double more = random & ((uint32_t{1} << bits) - 1);
  const bool up = lost + more >= std::ldexp(1, bits);
  const double rounded =
      std::ldexp(std::floor(units) + (up ? 1 : 0), exponent - 10);
  const double value = rounded >= 65536 ? HUGE_VAL : rounded;
  return std::copysign(static_cast<float>(value), x);
}

}  // namespace tessera::oracle
#endif  // VERIFY_ORACLE_ROUNDING_H_
