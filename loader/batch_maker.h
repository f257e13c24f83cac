// BatchMaker draws batches from an order, one after the other, and makes
// several at a time.
#ifndef LOADER_BATCH_MAKER_H_
#define LOADER_BATCH_MAKER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/stream/stream_point.h"
#include "data/sample_order.h"
#include "loader/batch.h"
#include "loader/block_pool.h"
#include "loader/data_loader.h"

namespace tessera {

// Returns the number of batches that are ready or being made, in all; 0 without
// workers.
inline int QueueDepth(const DataLoaderOptions& options) {
  if (options.workers == 0) return 0;
  return options.prefetch > 0 ? options.prefetch : 2 * options.workers;
}

// A place in the order.
struct OrderPlace {
  std::string state;
  int64_t epoch = 0;
};

// A batch, from its draw to its delivery.
struct DrawnBatch {
  Batch batch;          // without tensors until it is made
  OrderPlace behind;    // where the next batch begins
  absl::Status status;  // why there are no tensors
  bool on_device = false;
  StreamPoint copied;  // if on_device
};

class BatchMaker {
 public:
  // `options` are checked. REQUIRES: order and fetch are not null.
  BatchMaker(std::unique_ptr<SampleOrder> order, Fetch fetch,
             const DataLoaderOptions& options)
      : order_(std::move(order)),
        fetch_(std::move(fetch)),
        options_(options),
        pool_(QueueDepth(options) + 2) {}

  // ---- Threads: the caller serializes these calls.

  // Draws the samples of the next batch. May take as long as
  // SampleOrder::NextBatch.
  void Draw(DrawnBatch* drawn);
  OrderPlace place() const { return {order_->State(), order_->epoch()}; }
  // Move as the order's methods do. The next batch has the number 0.
  absl::Status Seek(absl::string_view state);
  absl::Status SetEpoch(int64_t epoch);

  // ---- Threads: any.

  // Fetches and pins what was drawn, or sets its status to the reason why not.
  // Does not throw.
  void Make(DrawnBatch* drawn, const std::atomic<bool>* cancelled);
  // Returns the time spent in Make, all threads together.
  absl::Duration making() const {
    return absl::Nanoseconds(making_nanos_.load(std::memory_order_relaxed));
  }

 private:
  absl::Status DrawSamples(Batch* batch);
  // With EpochEnd::kDrop, skips what is left of an epoch if it is less than a
  // batch.
  absl::Status PassShortEnd();
  absl::Status MakeTensors(Batch* batch, const std::atomic<bool>* cancelled);

  const std::unique_ptr<SampleOrder> order_;
  const Fetch fetch_;
  const DataLoaderOptions options_;
  BlockPool pool_;  // for a queue, and what is made and used beside it
  int64_t drawn_ = 0;
  std::atomic<int64_t> making_nanos_{0};
};

}  // namespace tessera
#endif  // LOADER_BATCH_MAKER_H_
