// DataLoader: batches in the order of a sampler, made ahead on threads; torch's
// DataLoader and torchdata's StatefulDataLoader in one.
//
//   order     0 1 2 3 4 ...                SampleOrder: which samples come
//   workers   [w1: 3] [w0: 4]              Fetch, each a whole batch
//   ready     1 2                          at most `prefetch`, in order
//   on device 1                            copied ahead on a stream of its own
//   Next() -> 0                            and State() stands behind it
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
// Ranks have a loader each, and take from it in step. None of this is
// COLLECTIVE: an error is this rank's alone, and a rank that leaves a step for
// it keeps the others waiting in the next collective until it ends or has
// announced it. Where it may happen, agree on the status before the forward:
// communicator->AgreeOk(batch.status(), "data") returns it on all ranks.
//
// Threads: calls come from one thread at a time; stats() from any.
#ifndef LOADER_DATA_LOADER_H_
#define LOADER_DATA_LOADER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "data/sample_order.h"
#include "loader/batch.h"
#include "loader/loader_options.h"

namespace tessera {

// Since Create.
struct DataLoaderStats {
  int64_t batches = 0;  // that Next has returned
  int64_t samples = 0;
  int64_t bytes = 0;
  int64_t errors = 0;
  // Next waited for a batch to be made; without workers all that Fetch took.
  absl::Duration waited;
  absl::Duration fetching;  // in Fetch, all workers together
  // Batches that Next found ready, with the one that it took, on average: near
  // 0 where data is the limit, near `prefetch` where training is.
  double ready = 0;
};

class DataLoader {
 public:
  // Starts the workers, which begin at once. `fetch` and all it holds are
  // destroyed with the loader. InvalidArgument (options); ResourceExhausted (no
  // threads left). LOCAL.
  static absl::StatusOr<std::unique_ptr<DataLoader>> Create(
      std::unique_ptr<SampleOrder> order, Fetch fetch,
      const DataLoaderOptions& options);
  // What is being made is dropped: waits for the calls of Fetch under way, and
  // for no others.
  ~DataLoader();
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  // The next batch, on and on: behind an epoch comes the next. On a device: its
  // tensors are there for what this thread's current stream is given from here
  // on; another stream has to come after that. They may be dropped at any time.
  //
  // An error of Fetch (a Status, or what it threw, as CatchTorch maps it), of
  // pinning or of the copy comes in the place of its batch, with its number and
  // samples. The batches behind it are not affected: the next call passes over
  // it. FailedPrecondition: no batch is full (EpochEnd::kDrop).
  // LOCAL, blocking.
  absl::StatusOr<Batch> Next();

  // Where Next will go on: behind the last batch that it returned, whatever was
  // made ahead. A batch whose place was taken by an error is not behind, until
  // Next has been called again. One line of text, the same on all ranks that
  // have taken as many; part of a checkpoint's client_state
  // (loader/client_state.h). LOCAL, does not wait.
  std::string State() const;
  // Goes to where State was called, by any number of ranks and workers, with
  // any batch size. Errors, after which nothing has changed: DataLoss for text
  // that is none of State's; FailedPrecondition for another order, other data,
  // or another seed. LOCAL.
  absl::Status Load(absl::string_view state);
  // To the start of `epoch`. InvalidArgument if there is no such. LOCAL.
  absl::Status SetEpoch(int64_t epoch);
  // Of the first sample of the next batch.
  int64_t epoch() const;

  // Cheap. LOCAL. Process-wide: DataWaitNanos (base/thread/wait_clock.h).
  DataLoaderStats stats() const;

 private:
  class Impl;
  explicit DataLoader(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
#endif  // LOADER_DATA_LOADER_H_
