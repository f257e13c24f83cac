// IndexPermutation is a random order of 0 .. n-1, any place of which can be
// computed without a table.
//
// The order is a Feistel network of eight rounds of MixBits (base/bits.h) on
// numbers of an even count of bits; a result of n or above goes through again
// until it is below ("cycle walking"; Black and Rogaway, Ciphers with Arbitrary
// Finite Domains, 2002). It takes O(1) memory and 8 to 32 rounds for a place on
// average, where the table of Fisher-Yates takes 8 n bytes and O(n) time at the
// beginning of each epoch. The bits depend on n and key alone. A change of this
// changes every run that uses a Mixture.
//
// Threads: const methods may run concurrently.
#ifndef DATA_INDEX_PERMUTATION_H_
#define DATA_INDEX_PERMUTATION_H_

#include <cstdint>

namespace tessera {

class IndexPermutation {
 public:
  // REQUIRES: n >= 1.
  IndexPermutation(int64_t n, uint64_t key);

  // Returns the number at `place`. REQUIRES: 0 <= place < n.
  int64_t At(int64_t place) const;

 private:
  uint64_t Once(uint64_t value) const;

  int64_t n_;
  int half_bits_;
  uint64_t key_;
};

}  // namespace tessera
#endif  // DATA_INDEX_PERMUTATION_H_
