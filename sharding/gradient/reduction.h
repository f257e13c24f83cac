// Reduction: the sum over all ranks of the gradients of one flat parameter, or
// of several small ones packed together.
//
//   ranks 0 1 2 3, shard groups of 2
//
//   within a group     sum of ranks 0, 1 | sum of ranks 2, 3   reduce-scatter
//   over its replicas  (0 + 1) + (2 + 3)                       all-reduce
//
// Both sums run in rank order and round to the tensor's dtype as
// comm/communicator.h says. So all replicas have the same bits, which differ
// from those of a single group of all ranks.
//
// Source: buckets as in PyTorch's DDP (Li et al., 2020) and DeepSpeed's
// reduce_bucket_size.
//
// Threads: none of its own; the caller orders the calls.
#ifndef SHARDING_GRADIENT_REDUCTION_H_
#define SHARDING_GRADIENT_REDUCTION_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/layout/flat_buffer.h"
#include "comm/communicator.h"
#include "sharding/gradient/flat_gradient.h"

namespace tessera {

// Divisors that make the sum over ranks the step's gradient.
struct MeanOptions {
  double predivide = 1;  // what each rank divides by before the sum
  double divisor = 1;    // what the sum is divided by
};

class Reduction {
 public:
  // Starts the reduction of what has arrived in `flats`, which are not empty
  // and have one device, reduce dtype and stage. COLLECTIVE, ASYNC.
  static absl::StatusOr<std::unique_ptr<Reduction>> Start(
      std::vector<FlatGradient*> flats, MeanOptions mean);
  // Starts the reduction of what `flat` held, after its Commit. COLLECTIVE,
  // ASYNC.
  static absl::StatusOr<std::unique_ptr<Reduction>> StartHeld(
      FlatGradient* flat, MeanOptions mean);
  const std::vector<FlatGradient*>& flats() const { return flats_; }
  // Waits for the reduction and gives every flat its sums. LOCAL. Call it once.
  absl::Status Finish();

 private:
  Reduction(std::vector<FlatGradient*> flats, MeanOptions mean)
      : flats_(std::move(flats)), mean_(mean) {}
  // Starts the reduction of one flat. `whole`: what it sends; `what`: its name
  // in messages.
  absl::Status StartAlone(const at::Tensor& whole, absl::string_view what);
  absl::Status StartPacked();
  // Starts to set `mine` to the sum over all ranks of this rank's part of
  // `whole`: [S] of [W * S], W the size of the shard group of `flat`; where its
  // optimizer is not sharded, both are the whole flat. `mine` may be this
  // rank's part of `whole`, whose contents are unspecified afterwards.
  // COLLECTIVE, ASYNC.
  void StartSum(const FlatParameter& flat, const at::Tensor& whole,
                const at::Tensor& mine, const CommTag& tag);
  void Trace() const;

  std::vector<FlatGradient*> flats_;
  MeanOptions mean_;
  FlatBuffer packed_;             // of several flats
  std::vector<at::Tensor> sums_;  // by flat, [owned]
  CommFuture within_group_, over_replicas_;
  double divided_by_ = 1;  // the part of mean_.divisor that is divided already
  int64_t begun_ = 0;      // where a trace is recorded
};

}  // namespace tessera
#endif  // SHARDING_GRADIENT_REDUCTION_H_
