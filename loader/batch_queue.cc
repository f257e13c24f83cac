#include "loader/batch_queue.h"

#include <algorithm>
#include <utility>

#include "ATen/Parallel.h"
#include "absl/synchronization/notification.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "base/thread/start_thread.h"

namespace tessera {

// A worker's operators run on its thread alone: thread teams of several workers
// would slow each other and the training. libtorch gives new threads the number
// that was set last, so that is restored afterwards.
absl::StatusOr<std::unique_ptr<BatchQueue>> BatchQueue::Start(
    BatchMaker* maker, const BatchQueueLimits& limits) {
  std::unique_ptr<BatchQueue> queue(new BatchQueue(maker, limits));
  const int all = at::get_num_threads();
  absl::Status status;
  for (int i = 0; i < limits.workers && status.ok(); ++i) {
    absl::Notification begun;
    auto thread = StartThread("tessera-loader", [&, self = queue.get()] {
      (void)at::get_num_threads();  // initializes this thread's number, once
      if (all > 1) at::set_num_threads(1);
      begun.Notify();
      self->Work();
    });
    status = thread.status();
    if (!status.ok()) break;
    queue->workers_.push_back(*std::move(thread));
    begun.WaitForNotification();
  }
  if (all > 1) at::set_num_threads(all);
  TESSERA_RETURN_IF_ERROR(Annotate(status, "loader"));
  return queue;
}

BatchQueue::~BatchQueue() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    run_->cancelled.store(true, std::memory_order_relaxed);
  }
  for (std::thread& worker : workers_) worker.join();
}

void BatchQueue::Work() {
  while (const std::shared_ptr<Slot> slot = Begin()) {
    maker_->Make(slot->drawn.get(), &slot->run->cancelled);
    End(slot);
  }
}

// Returns whether another batch may be made. A batch's size is known once it is
// made. To keep the limit, only one is made until there has been one, and those
// that are being made count as the largest so far.
bool BatchQueue::HasRoom() const {
  if (slots_.empty()) return true;  // one, however large: nobody waits for ever
  if (slots_.size() >= limits_.depth) return false;
  if (limits_.bytes == 0) return true;
  if (largest_bytes_ < 0) return false;
  const auto begun = static_cast<int64_t>(slots_.size()) - ready_ + 1;
  return ready_bytes_ + begun * largest_bytes_ <= limits_.bytes;
}

// Draws outside of the lock, since an order may take long to go to its next
// epoch, and batches that are ready must be available meanwhile.
std::shared_ptr<BatchQueue::Slot> BatchQueue::Begin() {
  auto slot = std::make_shared<Slot>();
  {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(this, &BatchQueue::MayBegin));
    if (stopping_) return nullptr;
    drawing_ = true;
    slot->run = run_;
  }
  maker_->Draw(slot->drawn.get());
  absl::MutexLock lock(&mutex_);
  drawing_ = false;
  if (stopping_) return nullptr;
  slots_.push_back(slot);
  return slot;
}

void BatchQueue::End(const std::shared_ptr<Slot>& slot) {
  absl::MutexLock lock(&mutex_);
  if (slot->run != run_) return;  // dropped
  slot->ready = true;
  ++ready_;
  ready_bytes_ += slot->drawn->batch.bytes;
  if (!slot->drawn->status.ok()) return;  // its size is not known
  largest_bytes_ = std::max(largest_bytes_, slot->drawn->batch.bytes);
}

BatchQueue::Taken BatchQueue::Take() {
  Taken taken;
  absl::MutexLock lock(&mutex_);
  taken.ready = ready_;
  if (!IsFrontReady()) {
    const absl::Duration begin = MonotonicNow();
    mutex_.Await(absl::Condition(this, &BatchQueue::IsFrontReady));
    taken.waited = MonotonicNow() - begin;
  }
  taken.drawn = std::move(slots_.front()->drawn);
  slots_.pop_front();
  --ready_;
  ready_bytes_ -= taken.drawn->batch.bytes;
  return taken;
}

DrawnBatch* BatchQueue::Ready(size_t before) {
  absl::MutexLock lock(&mutex_);
  if (before >= slots_.size() || !slots_[before]->ready) return nullptr;
  return slots_[before]->drawn.get();
}

absl::Status BatchQueue::Restart(absl::FunctionRef<absl::Status()> go) {
  std::deque<std::shared_ptr<Slot>> dropped;  // freed outside of the lock
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(
      +[](BatchQueue* queue)
           ABSL_NO_THREAD_SAFETY_ANALYSIS { return !queue->drawing_; },
      this));
  TESSERA_RETURN_IF_ERROR(go());
  run_->cancelled.store(true, std::memory_order_relaxed);
  run_ = std::make_shared<Run>();
  slots_.swap(dropped);
  ready_ = 0;
  ready_bytes_ = 0;
  return absl::OkStatus();
}

}  // namespace tessera
