// What a DataLoader is to do.
#ifndef LOADER_LOADER_OPTIONS_H_
#define LOADER_LOADER_OPTIONS_H_

#include <cstdint>
#include <optional>

#include "ATen/core/Tensor.h"

namespace tessera {

// What becomes of the samples at the end of an epoch that are fewer than a
// batch.
enum class EpochEnd {
  kContinue,  // the batch is filled up from the next epoch: all are full
  kShort,     // they are a batch of their own (torch: drop_last=False)
  kDrop,      // nobody sees them (torch: drop_last=True)
};

struct DataLoaderOptions {
  int64_t batch_size = 1;  // this rank's samples
  EpochEnd epoch_end = EpochEnd::kContinue;
  uint64_t seed = 0;  // of BatchContext::Random; the same on all ranks
  // Threads that call Fetch; 0: Next does (torch: num_workers).
  int workers = 0;
  // Batches that are ready or being made, in all; 0: two for each worker
  // (torch: workers * prefetch_factor). Nothing without workers.
  int prefetch = 0;
  // Of the batches that are ready, on the host or copied ahead. One that is
  // being made counts as the largest so far. One batch is always let in,
  // however large; 0: no limit.
  int64_t prefetch_bytes = 0;
  // Where batches go.
  at::Device device = at::kCPU;
  // Batches that are copied to it, or being copied, before they are asked for,
  // besides the one that Next returns. Nothing without workers.
  int device_prefetch = 1;
  // Copies from pinned memory go on beside the host's and the device's work.
  // Absent: with a device other than the CPU.
  std::optional<bool> pin_memory;
};

}  // namespace tessera
#endif  // LOADER_LOADER_OPTIONS_H_
