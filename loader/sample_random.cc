#include "loader/sample_random.h"

#include <cmath>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/core/PhiloxRNGEngine.h"
#include "absl/numeric/int128.h"
#include "base/bits.h"
#include "base/check.h"

namespace tessera {

// Seeds and epochs are small numbers: mixing keeps (0, 1) and (1, 0) apart.
SampleRandom::SampleRandom(uint64_t seed, int64_t epoch, int64_t sample)
    : key_(MixBits(MixBits(seed + kMixStep) +
                   static_cast<uint64_t>(epoch) * kMixStep)),
      sample_(static_cast<uint64_t>(sample)) {}

void SampleRandom::Refill() {
  at::Philox4_32 philox(key_, /*subsequence=*/sample_, /*offset=*/block_++);
  for (uint64_t& word : words_) {
    const uint64_t low = philox();
    word = low | static_cast<uint64_t>(philox()) << 32;
  }
  used_ = 0;
}

// Returns the upper word of draw * bound, where draws whose lower word is below
// 2^64 mod bound are thrown away.
int64_t SampleRandom::Below(int64_t bound) {
  TESSERA_CHECK_GT(bound, 0);
  const auto wide = static_cast<uint64_t>(bound);
  const uint64_t reject_below = (0 - wide) % wide;
  for (;;) {
    const absl::uint128 product = absl::uint128((*this)()) * wide;
    if (absl::Uint128Low64(product) >= reject_below) {
      return static_cast<int64_t>(absl::Uint128High64(product));
    }
  }
}

double SampleRandom::Normal() {
  constexpr double kTwoPi = 6.283185307179586477;
  const double radius = std::sqrt(-2 * std::log1p(-Uniform()));
  return radius * std::cos(kTwoPi * Uniform());
}

at::Generator SampleRandom::Generator() {
  return at::detail::createCPUGenerator((*this)());
}

}  // namespace tessera
