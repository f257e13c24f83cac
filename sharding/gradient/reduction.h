// Reduction: one sum over ranks (sharding/flat/sum_over_ranks.h) of the
// gradients of one unit, or of several small ones packed together.
//
// Source: buckets as in PyTorch's DDP (Li et al., 2020) and DeepSpeed's
// reduce_bucket_size.
//
// Threads: none of its own; the caller orders the calls.
#ifndef SHARDING_GRADIENT_REDUCTION_H_
#define SHARDING_GRADIENT_REDUCTION_H_

#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "sharding/flat/sum_over_ranks.h"
#include "sharding/gradient/flat_gradient.h"
#include "sharding/layout/flat_buffer.h"

namespace tessera {

// How the sum over ranks becomes the step's gradient.
struct MeanOptions {
  double predivide = 1;  // what each rank divides by before the sum
  double divisor = 1;    // what the sum is divided by
};

class Reduction {
 public:
  // `units` are of one device, reduce dtype and stage; not empty. What they
  // hold starts on its way. COLLECTIVE, ASYNC.
  static absl::StatusOr<std::unique_ptr<Reduction>> Start(
      std::vector<FlatGradient*> flats, MeanOptions mean);
  // Waits, and gives every unit its part. LOCAL. Call it once.
  absl::Status Finish();

 private:
  Reduction(std::vector<FlatGradient*> flats, MeanOptions mean)
      : flats_(std::move(flats)), mean_(mean) {}
  absl::Status StartAlone();
  absl::Status StartPacked();

  std::vector<FlatGradient*> flats_;
  MeanOptions mean_;
  FlatBuffer packed_;             // of several units
  std::vector<at::Tensor> sums_;  // by unit, [owned]
  SumOverRanks done_;
};

}  // namespace tessera
#endif  // SHARDING_GRADIENT_REDUCTION_H_
