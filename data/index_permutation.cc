#include "data/index_permutation.h"

#include "base/bits.h"
#include "base/check.h"

namespace tessera {

IndexPermutation::IndexPermutation(int64_t n, uint64_t key)
    : n_(n), half_bits_(1), key_(MixBits(key)) {
  TESSERA_CHECK_GE(n, 1);
  while (half_bits_ < 32 && uint64_t{1} << (2 * half_bits_ - 1) <
                                (static_cast<uint64_t>(n) + 1) / 2) {
    ++half_bits_;
  }
}

uint64_t IndexPermutation::Once(uint64_t value) const {
  constexpr uint64_t kRounds = 8;
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = value >> half_bits_, right = value & mask;
  for (uint64_t round = 1; round <= kRounds; ++round) {
    const uint64_t mixed = MixBits((key_ + round * kMixStep) ^ right) & mask;
    const uint64_t next = left ^ mixed;
    left = right;
    right = next;
  }
  return left << half_bits_ | right;
}

int64_t IndexPermutation::At(int64_t place) const {
  TESSERA_CHECK_GE(place, 0);
  TESSERA_CHECK_LT(place, n_);
  uint64_t value = static_cast<uint64_t>(place);
  do {
    value = Once(value);
  } while (value >= static_cast<uint64_t>(n_));
  return static_cast<int64_t>(value);
}

}  // namespace tessera
