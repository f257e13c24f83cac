// DataLoader returns batches in the order of a sampler, made ahead on threads;
// it is torch's DataLoader and torchdata's StatefulDataLoader in one.
//
//   order     0 1 2 3 4 ...                SampleOrder: which samples come
//   workers   [w1: 3] [w0: 4]              Fetch, each a whole batch
//   ready     1 2                          at most `prefetch`, in order
//   on device 1                            copied ahead on a stream of its own
//   Next() -> 0                            and State() is after it
//
//   auto order = tessera::DistributedOrder::Create({...});
//   auto loader = tessera::DataLoader::Create(*std::move(order), fetch, {...});
//   for (...) {
//     absl::StatusOr<tessera::Batch> batch = (*loader)->Next();
//     ...
//     engine->SaveCheckpoint(dir, (*loader)->State());
//   }
//
// Batches and their bits do not depend on the number of workers, as long as
// Fetch takes its random numbers from the BatchContext.
//
// Each rank has a loader of its own, and takes from it in step. NextOnAll
// returns an error of one rank on all. Nothing else is COLLECTIVE: an error of
// Next is this rank's alone, and a rank that leaves a step because of it keeps
// the others waiting in the next collective until it ends or has announced the
// error.
//
// Threads: calls come from one thread at a time; any thread may call stats().
#ifndef LOADER_DATA_LOADER_H_
#define LOADER_DATA_LOADER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "data/sample_order.h"
#include "loader/batch.h"

namespace tessera {

class Communicator;  // comm/communicator.h

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

// Figures since Create.
struct DataLoaderStats {
  int64_t batches = 0;  // that Next has returned
  int64_t samples = 0;
  int64_t bytes = 0;
  int64_t errors = 0;
  // How long Next waited for a batch to be made; without workers all the time
  // that Fetch took.
  absl::Duration waited;
  absl::Duration fetching;  // in Fetch, all workers together
  // How many batches Next found ready, including the one that it took, on
  // average: near 0 where data is the limit, near `prefetch` where training is.
  double ready = 0;
};

class DataLoader {
 public:
  // Starts the workers, which begin at once. `fetch` and all it holds are
  // destroyed with the loader. Returns InvalidArgument (options) or
  // ResourceExhausted (no threads left). LOCAL.
  static absl::StatusOr<std::unique_ptr<DataLoader>> Create(
      std::unique_ptr<SampleOrder> order, Fetch fetch,
      const DataLoaderOptions& options);
  // These two make the usual mistakes readable: an order that is still in its
  // StatusOr, and the options of libtorch's class of the same name.
  template <typename T, typename Options = DataLoaderOptions>
  static absl::StatusOr<std::unique_ptr<DataLoader>> Create(
      const absl::StatusOr<T>&, Fetch, const Options&) {
    static_assert(sizeof(T) == 0,
                  "DataLoader::Create takes an order and no StatusOr of one: "
                  "TESSERA_ASSIGN_OR_RETURN(auto order, "
                  "tessera::DistributedOrder::Create(...))");
    return nullptr;
  }
  template <typename Options,
            std::enable_if_t<!std::is_convertible_v<const Options&,
                                                    const DataLoaderOptions&>,
                             int> = 0>
  static absl::StatusOr<std::unique_ptr<DataLoader>> Create(
      std::unique_ptr<SampleOrder>, Fetch, const Options&) {
    static_assert(sizeof(Options) == 0,
                  "DataLoader::Create takes tessera::DataLoaderOptions, not "
                  "torch::data::DataLoaderOptions: write the namespace");
    return nullptr;
  }
  // Drops what is being made: waits for the calls of Fetch under way, and for
  // no others.
  ~DataLoader();
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  // Returns the next batch, endlessly: the next epoch follows each epoch. On a
  // device the tensors are ready for what this thread's current stream is given
  // from here on; another stream has to be ordered after that. They may be
  // dropped at any time.
  //
  // An error of Fetch (a Status, or what it threw, as CatchTorch maps it), of
  // pinning or of the copy is returned in place of its batch, with the batch's
  // number and samples. Later batches are not affected: the next call returns
  // the batch after it. Returns FailedPrecondition if no batch is full
  // (EpochEnd::kDrop). LOCAL, blocking.
  absl::StatusOr<Batch> Next();
  // As Next, where an error of one rank is returned on all ranks of `comm`,
  // naming the rank. The loaders stay in step: this batch counts as replaced by
  // an error on all of them, so State is the same on all and the next call
  // returns the batch after it. COLLECTIVE, blocking: one small exchange.
  absl::StatusOr<Batch> NextOnAll(Communicator& comm);

  // Returns the place after the last batch that Next returned, whatever was
  // made ahead. A batch that was replaced by an error counts as returned only
  // after Next has been called again. The text is one line, the same on all
  // ranks that have taken as many batches; store it in a checkpoint's
  // client_state (loader/client_state.h). LOCAL, does not wait.
  std::string State() const;
  // Moves to where State was called, by any number of ranks and workers, with
  // any batch size. After an error nothing has changed. Returns DataLoss for
  // text that State did not write, and FailedPrecondition for another order,
  // other data, or another seed. LOCAL.
  absl::Status Load(absl::string_view state);
  // Moves to the start of `epoch`. Returns InvalidArgument if there is no such
  // epoch. LOCAL.
  absl::Status SetEpoch(int64_t epoch);
  // Returns the epoch of the first sample of the next batch.
  int64_t epoch() const;

  // Is cheap. LOCAL. DataWaitNanos (base/thread/wait_clock.h) has the waits of
  // the whole process.
  DataLoaderStats stats() const;

 private:
  class Impl;
  explicit DataLoader(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
#endif  // LOADER_DATA_LOADER_H_
