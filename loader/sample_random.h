// SampleRandom gives random numbers that depend only on (seed, epoch, sample)
// and on how many were drawn before.
//
// It is Philox4x32-10 (Salmon et al., 2011; torch's CUDA generator): key = 64
// bits mixed from seed and epoch, upper counter = sample, lower counter = 0, 1,
// ... So two samples of an epoch never share a number of the sequence. A change
// of this changes every training run.
//
// It is a UniformRandomBitGenerator: std::shuffle and <random>'s distributions
// take it, too, but those differ between libraries; Uniform, Below and Normal
// are the same everywhere.
//
// Threads: the caller serializes the calls.
#ifndef LOADER_SAMPLE_RANDOM_H_
#define LOADER_SAMPLE_RANDOM_H_

#include <array>
#include <cstdint>

#include "ATen/core/Tensor.h"

namespace tessera {

class SampleRandom {
 public:
  using result_type = uint64_t;

  // Starts at the first number of this sample in this epoch.
  SampleRandom(uint64_t seed, int64_t epoch, int64_t sample);

  // The least and the largest number: all 64 bits.
  static constexpr uint64_t min() { return 0; }
  static constexpr uint64_t max() { return ~uint64_t{0}; }
  // Returns 64 bits.
  uint64_t operator()() {
    if (used_ == words_.size()) Refill();
    return words_[used_++];
  }

  // Returns a number in [0, 1), a multiple of 2^-53.
  double Uniform() { return static_cast<double>((*this)() >> 11) * 0x1.0p-53; }
  // Returns a number in [0, bound), all equally likely. REQUIRES: bound > 0.
  int64_t Below(int64_t bound);
  // Returns a number of mean 0 and variance 1 (Box-Muller; takes two numbers
  // for each).
  double Normal();
  // Returns a CPU generator for libtorch's operators, such as at::randn(sizes,
  // generator), seeded with the next number.
  at::Generator Generator();

 private:
  void Refill();

  uint64_t key_;
  uint64_t sample_;
  uint64_t block_ = 0;  // of the counter, the one that comes next
  std::array<uint64_t, 2> words_ = {};
  size_t used_ = 2;
};

}  // namespace tessera
#endif  // LOADER_SAMPLE_RANDOM_H_
