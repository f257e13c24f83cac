// LoaderOptions are the settings of a DataLoader.
#ifndef LOADER_LOADER_OPTIONS_H_
#define LOADER_LOADER_OPTIONS_H_

#include <cstdint>
#include <optional>

#include "ATen/core/Tensor.h"

namespace tessera {

// EpochEnd says what happens to the samples at the end of an epoch that are
// fewer than a batch.
enum class EpochEnd {
  kContinue,  // the next epoch fills the batch up: all are full
  kShort,     // they are a batch of their own (torch: drop_last=False)
  kDrop,      // nobody sees them (torch: drop_last=True)
};

struct DataLoaderOptions {
  int64_t batch_size = 1;  // this rank's samples
  EpochEnd epoch_end = EpochEnd::kContinue;
  uint64_t seed = 0;  // for BatchContext::Random; the same on all ranks
  // Threads that call Fetch; 0: Next does (torch: num_workers).
  int workers = 0;
  // Batches that are ready or being made, in all; 0: two for each worker
  // (torch: workers * prefetch_factor). Ignored without workers.
  int prefetch = 0;
  // The most bytes of batches that are ready, on the host or copied ahead. A
  // batch that is being made counts as the largest so far. One batch is always
  // allowed, however large; 0: no limit.
  int64_t prefetch_bytes = 0;
  // The device to which batches go.
  at::Device device = at::kCPU;
  // Batches that are copied to the device, or being copied, before they are
  // asked for, besides the one that Next returns. Ignored without workers.
  int device_prefetch = 1;
  // Whether batches are in pinned memory, copies from which run beside the work
  // of the host and the device. Absent: if the device is not the CPU.
  std::optional<bool> pin_memory;
};

}  // namespace tessera
#endif  // LOADER_LOADER_OPTIONS_H_
