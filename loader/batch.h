// Batch is what a DataLoader returns; BatchContext is what a Fetch knows of the
// batch that it makes.
#ifndef LOADER_BATCH_H_
#define LOADER_BATCH_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "data/sample_order.h"
#include "loader/sample_random.h"

namespace tessera {

class BlockPool;  // loader/block_pool.h

struct Batch {
  // The tensors as Fetch returned them, on DataLoaderOptions::device.
  std::vector<at::Tensor> tensors;
  // The samples in the order of the tensors' rows, if Fetch keeps it.
  std::vector<Sample> samples;
  int64_t number = 0;  // from 0 on, since Create, Load or SetEpoch
  int64_t bytes = 0;   // of the tensors
  // Whether the next batch begins with another epoch's first sample, or this
  // one has crossed the end of an epoch (EpochEnd::kContinue).
  bool ends_epoch = false;
};

// One call of Fetch, on its thread.
class BatchContext {
 public:
  // `pool` is null where memory is pinned.
  BatchContext(uint64_t seed, absl::Span<const Sample> samples, BlockPool* pool,
               const std::atomic<bool>* cancelled)
      : seed_(seed), samples_(samples), pool_(pool), cancelled_(cancelled) {}

  absl::Span<const Sample> samples() const { return samples_; }

  // Returns random numbers for the batch's sample `i`, always from the first
  // on. They depend on (DataLoaderOptions::seed, its epoch, its index) alone,
  // so they are the same whichever worker asks, in whichever batch and at any
  // number of ranks.
  SampleRandom Random(int64_t i) const {
    const Sample& sample = samples_[static_cast<size_t>(i)];
    return {seed_, sample.epoch, sample.index};
  }

  // Returns memory for a tensor of the batch, of any content: pinned if the
  // loader pins, which saves it a copy; otherwise that of a batch which nobody
  // uses any more, if there is one.
  at::Tensor Empty(at::IntArrayRef sizes, at::ScalarType dtype) const;

  // Returns whether nobody will see the result (the loader ends, or moves
  // elsewhere); a slow Fetch may return an error at once.
  bool cancelled() const { return cancelled_->load(std::memory_order_relaxed); }

 private:
  const uint64_t seed_;
  const absl::Span<const Sample> samples_;
  BlockPool* const pool_;
  const std::atomic<bool>* const cancelled_;
};

// Makes the tensors of a batch, on the CPU: all samples of `indices`, collated
// (torch's Dataset.__getitems__ and collate_fn in one). Several threads call it
// at the same time, without autograd and autocast; operators use one thread on
// workers. Take random numbers from context.Random: libtorch's default
// generators belong to the process, and their numbers depend on which thread is
// first. It may throw.
using Fetch = std::function<absl::StatusOr<std::vector<at::Tensor>>(
    absl::Span<const int64_t> indices, const BatchContext& context)>;

}  // namespace tessera
#endif  // LOADER_BATCH_H_
