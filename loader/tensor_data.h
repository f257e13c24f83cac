// TensorData and Collated: samples that are in memory, as a source for a
// DataLoader and for evaluations (torch: TensorDataset, DataLoader's
// collate_fn).
//
//   TESSERA_ASSIGN_OR_RETURN(
//       auto data, tessera::TensorData::Create({images, labels}));
//   TESSERA_ASSIGN_OR_RETURN(
//       auto loader, tessera::LoadInMemory(data.fetch(), data.num_samples(),
//                                          *world->communicator(), options));
//   loader->Next()->tensors;     // [batch_size, 3, 32, 32], [batch_size]
//   data.Rows(samples);          // in Evaluate
//
// Each rank has all samples in its own memory. For a set that is larger than
// that, write a Fetch that reads files.
//
// Threads: const methods may run concurrently, Fetches on many threads.
#ifndef LOADER_TENSOR_DATA_H_
#define LOADER_TENSOR_DATA_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "data/distributed_order.h"  // IWYU pragma: export
#include "loader/batch.h"
#include "loader/data_loader.h"

namespace tessera {

class Communicator;  // comm/communicator.h

class TensorData {
 public:
  // Takes tensors on the CPU whose first dimension is the sample: [N, ...]
  // each, of any dtypes and other sizes. Memory is shared with the caller, who
  // must not change it while it is read. InvalidArgument: no tensors, no
  // samples, a tensor that is not on the CPU, different N. LOCAL.
  static absl::StatusOr<TensorData> Create(std::vector<at::Tensor> tensors);

  int64_t num_samples() const { return tensors_->front().size(0); }

  // Returns new tensors [n, ...] on the CPU: the rows `samples` of each tensor,
  // in this order. Throws c10::Error for a row that is not there. LOCAL.
  std::vector<at::Tensor> Rows(absl::Span<const int64_t> samples) const;

  // Returns a Fetch of the rows, which shares the tensors.
  Fetch fetch() const;

 private:
  explicit TensorData(std::vector<at::Tensor> tensors)
      : tensors_(std::make_shared<const std::vector<at::Tensor>>(
            std::move(tensors))) {}

  std::shared_ptr<const std::vector<at::Tensor>> tensors_;
};

// Stacks samples: each is a list of tensors, and tensor t of the batch is the
// stack of the samples' tensors t, [n, ...] (torch: default_collate). Throws
// StatusException (InvalidArgument) for samples with other numbers of tensors,
// and c10::Error for tensors of other sizes. LOCAL.
std::vector<at::Tensor> Stack(
    const std::vector<const std::vector<at::Tensor>*>& samples);

// Returns a Fetch over samples of any type T that are in memory. `collate`
// makes a batch's tensors of pointers to its samples, in the batch's order
// (Stack, where T is a list of tensors); it runs on several threads at once.
template <typename T>
Fetch Collated(
    std::vector<T> samples,
    std::function<std::vector<at::Tensor>(const std::vector<const T*>& samples)>
        collate) {
  return [samples = std::make_shared<const std::vector<T>>(std::move(samples)),
          collate = std::move(collate)](
             absl::Span<const int64_t> indices,
             const BatchContext&) -> absl::StatusOr<std::vector<at::Tensor>> {
    std::vector<const T*> batch;
    batch.reserve(indices.size());
    for (const int64_t index : indices) {
      batch.push_back(&samples->at(static_cast<size_t>(index)));
    }
    return collate(batch);
  };
}

// Makes a DataLoader over samples 0 to `num_samples` - 1 for this rank of
// `comm`: each rank takes its own part of each epoch, in an order that
// options.seed decides (DistributedOrder), or in the samples' order without
// `shuffle`. Errors are those of DistributedOrder::Create and
// DataLoader::Create. LOCAL.
absl::StatusOr<std::unique_ptr<DataLoader>> LoadInMemory(
    Fetch fetch, int64_t num_samples, const Communicator& comm,
    const DataLoaderOptions& options, bool shuffle = true);

}  // namespace tessera
#endif  // LOADER_TENSOR_DATA_H_
