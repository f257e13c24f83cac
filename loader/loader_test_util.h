// Helpers that tests of the loader share.
#ifndef LOADER_LOADER_TEST_UTIL_H_
#define LOADER_LOADER_TEST_UTIL_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/status_matchers.h"
#include "data/distributed_order.h"
#include "gtest/gtest.h"
#include "loader/data_loader.h"

namespace tessera {

inline DistributedSamplerOptions OrderOf(int64_t samples, int rank = 0,
                                         int world_size = 1) {
  DistributedSamplerOptions options;
  options.num_samples = samples;
  options.rank = rank;
  options.world_size = world_size;
  options.seed = 9;
  return options;
}

inline std::unique_ptr<DataLoader> MakeLoader(
    const DistributedSamplerOptions& order, Fetch fetch,
    const DataLoaderOptions& options) {
  auto made = DistributedOrder::Create(order);
  TESSERA_EXPECT_OK(made);
  auto loader = DataLoader::Create(*std::move(made), std::move(fetch), options);
  TESSERA_EXPECT_OK(loader);
  return *std::move(loader);
}

inline std::vector<int64_t> IndicesOf(const Batch& batch) {
  std::vector<int64_t> indices;
  for (const Sample& sample : batch.samples) indices.push_back(sample.index);
  return indices;
}

inline DataLoaderOptions LoaderOptions(int64_t batch_size, int workers,
                                       int prefetch = 0) {
  DataLoaderOptions options;
  options.batch_size = batch_size;
  options.workers = workers;
  options.prefetch = prefetch;
  return options;
}

using Tensors = absl::StatusOr<std::vector<at::Tensor>>;

// A Fetch that returns the indices themselves.
inline Tensors Indices(absl::Span<const int64_t> indices, const BatchContext&) {
  at::Tensor tensor =
      at::empty({static_cast<int64_t>(indices.size())}, at::kLong);
  std::copy(indices.begin(), indices.end(), tensor.data_ptr<int64_t>());
  return std::vector<at::Tensor>{tensor};
}

// A number that other threads wait for.
class Counter {
 public:
  void Add(int64_t n) {
    absl::MutexLock lock(&mutex_);
    value_ += n;
  }
  void WaitFor(int64_t least) {
    absl::MutexLock lock(&mutex_);
    const auto there = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      return value_ >= least;
    };
    mutex_.Await(absl::Condition(&there));
  }
  int64_t value() {
    absl::MutexLock lock(&mutex_);
    return value_;
  }

 private:
  absl::Mutex mutex_;
  int64_t value_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera
#endif  // LOADER_LOADER_TEST_UTIL_H_
