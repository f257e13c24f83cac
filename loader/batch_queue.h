// BatchQueue has threads that make batches ahead, and holds the batches in the
// order in which they were drawn.
//
//   slots_   [ready][ready][being made][ready][being made]   <- drawn next
//      Take ->                                    limit: depth, bytes
//
// A worker draws its batch and appends it to the queue before it makes it, so
// the order is that of the draws, whichever worker finishes first.
//
// Threads: one thread, the consumer, calls Take, Ready and Restart.
#ifndef LOADER_BATCH_QUEUE_H_
#define LOADER_BATCH_QUEUE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "loader/batch_maker.h"

namespace tessera {

struct BatchQueueLimits {
  int workers = 1;
  size_t depth = 2;   // batches in the queue
  int64_t bytes = 0;  // bytes of the queued batches; 0: no limit
};

class BatchQueue {
 public:
  // `maker` outlives this; only the queue draws from it. Returns
  // ResourceExhausted if there are no threads.
  static absl::StatusOr<std::unique_ptr<BatchQueue>> Start(
      BatchMaker* maker, const BatchQueueLimits& limits);
  // Drops all batches; waits for calls of Make under way.
  ~BatchQueue();
  BatchQueue(const BatchQueue&) = delete;
  BatchQueue& operator=(const BatchQueue&) = delete;

  struct Taken {
    std::unique_ptr<DrawnBatch> drawn;
    absl::Duration waited;  // until it was ready
    int ready = 0;          // batches that were ready when Take was called
  };
  // Returns the next batch. Blocking.
  Taken Take() ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns the batch that will be taken after `before` others, if it is ready;
  // null otherwise. It stays in the queue, and the consumer may change it.
  DrawnBatch* Ready(size_t before) ABSL_LOCKS_EXCLUDED(mutex_);
  // Calls `go`, which moves the maker's order, while nobody draws. If it
  // returns OK all batches are dropped, and the next one comes from the new
  // place.
  absl::Status Restart(absl::FunctionRef<absl::Status()> go)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Run holds the queue's batches between two calls of Restart.
  struct Run {
    std::atomic<bool> cancelled{false};
  };
  struct Slot {
    std::unique_ptr<DrawnBatch> drawn = std::make_unique<DrawnBatch>();
    std::shared_ptr<Run> run;
    bool ready = false;  // guarded by the queue's mutex
  };

  BatchQueue(BatchMaker* maker, const BatchQueueLimits& limits)
      : maker_(maker), limits_(limits) {}
  void Work();
  // Waits for room and draws; returns null if the queue ends.
  std::shared_ptr<Slot> Begin() ABSL_LOCKS_EXCLUDED(mutex_);
  void End(const std::shared_ptr<Slot>& slot) ABSL_LOCKS_EXCLUDED(mutex_);
  bool HasRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MayBegin() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || (!drawing_ && HasRoom());
  }
  bool IsFrontReady() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !slots_.empty() && slots_.front()->ready;
  }

  BatchMaker* const maker_;
  const BatchQueueLimits limits_;
  mutable absl::Mutex mutex_;
  std::deque<std::shared_ptr<Slot>> slots_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Run> run_ ABSL_GUARDED_BY(mutex_) = std::make_shared<Run>();
  int ready_ ABSL_GUARDED_BY(mutex_) = 0;  // of slots_
  int64_t ready_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // The largest batch that was ever ready; negative if none was.
  int64_t largest_bytes_ ABSL_GUARDED_BY(mutex_) = -1;
  bool drawing_ ABSL_GUARDED_BY(mutex_) = false;  // a worker is drawing
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> workers_;
};

}  // namespace tessera
#endif  // LOADER_BATCH_QUEUE_H_
