// SampleRandom: random numbers that are a function of (seed, epoch, sample) and
// of how many were drawn before, and of nothing else.
//
// Philox4x32-10 (Salmon et al., 2011; torch's CUDA generator): key = 64 bits
// mixed of seed and epoch, upper counter = sample, lower counter = 0, 1, ...
// So two samples of an epoch never share a number of the sequence. A change of
// this is a change of every training run.
//
// It is a UniformRandomBitGenerator: std::shuffle and <random>'s distributions
// take it, too, but those are each library's own; Uniform, Below and Normal are
// the same everywhere.
//
// Threads: outside order.
#ifndef LOADER_SAMPLE_RANDOM_H_
#define LOADER_SAMPLE_RANDOM_H_

#include <array>
#include <cstdint>

#include "ATen/core/Tensor.h"

namespace tessera {

class SampleRandom {
 public:
  using result_type = uint64_t;

  // Of this sample in this epoch, from its first number on.
  SampleRandom(uint64_t seed, int64_t epoch, int64_t sample);

  // The least and the largest of what it gives: all 64 bits.
  static constexpr uint64_t min() { return 0; }
  static constexpr uint64_t max() { return ~uint64_t{0}; }
  // 64 bits.
  uint64_t operator()() {
    if (used_ == words_.size()) Refill();
    return words_[used_++];
  }

  // In [0, 1), a multiple of 2^-53.
  double Uniform() { return static_cast<double>((*this)() >> 11) * 0x1.0p-53; }
  // In [0, bound), all as likely. REQUIRES: bound > 0.
  int64_t Below(int64_t bound);
  // Of mean 0 and variance 1 (Box-Muller; two numbers for each).
  double Normal();
  // For libtorch's operators, at::randn(sizes, generator) say: of the CPU,
  // seeded with the next number.
  at::Generator Generator();

 private:
  void Refill();

  uint64_t key_;
  uint64_t sample_;
  uint64_t block_ = 0;  // of the counter, that comes next
  std::array<uint64_t, 2> words_ = {};
  size_t used_ = 2;
};

}  // namespace tessera
#endif  // LOADER_SAMPLE_RANDOM_H_
