// Batch: what a DataLoader hands out; BatchContext: what a Fetch is told of the
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
  // As Fetch returned them; on DataLoaderOptions::device.
  std::vector<at::Tensor> tensors;
  // In the order of the tensors' rows, if Fetch keeps it.
  std::vector<Sample> samples;
  int64_t number = 0;  // from 0 on, since Create, Load or SetEpoch
  int64_t bytes = 0;   // of the tensors
  // The next batch begins with another epoch's first sample, or this one has
  // gone over the end of an epoch (EpochEnd::kContinue).
  bool ends_epoch = false;
};

// For one call of Fetch, on its thread.
class BatchContext {
 public:
  // `pool`: null where memory is pinned.
  BatchContext(uint64_t seed, absl::Span<const Sample> samples, BlockPool* pool,
               const std::atomic<bool>* cancelled)
      : seed_(seed), samples_(samples), pool_(pool), cancelled_(cancelled) {}

  absl::Span<const Sample> samples() const { return samples_; }

  // Random numbers for the batch's sample `i`, always from the first on: of
  // (DataLoaderOptions::seed, its epoch, its index) alone. So they are the same
  // whichever worker asks, in whichever batch and at any number of ranks.
  SampleRandom Random(int64_t i) const {
    const Sample& sample = samples_[static_cast<size_t>(i)];
    return {seed_, sample.epoch, sample.index};
  }

  // Memory for a tensor of the batch, of any content: pinned where the loader
  // pins, which saves it a copy; else that of a batch which nobody has any
  // more, where there is one.
  at::Tensor Empty(at::IntArrayRef sizes, at::ScalarType dtype) const;

  // Nobody will see the result (the loader ends, or goes elsewhere): what takes
  // long may return an error at once.
  bool cancelled() const { return cancelled_->load(std::memory_order_relaxed); }

 private:
  const uint64_t seed_;
  const absl::Span<const Sample> samples_;
  BlockPool* const pool_;
  const std::atomic<bool>* const cancelled_;
};

// Makes the tensors of a batch, on the CPU: all samples of `indices`, collated
// (torch's Dataset.__getitems__ and collate_fn in one). Several threads call it
// at the same time. Without autograd and autocast; operators use one thread on
// workers. libtorch's default generators are the process's, and what they give
// depends on who is first: take context.Random. It may throw.
using Fetch = std::function<absl::StatusOr<std::vector<at::Tensor>>(
    absl::Span<const int64_t> indices, const BatchContext& context)>;

}  // namespace tessera
#endif  // LOADER_BATCH_H_
