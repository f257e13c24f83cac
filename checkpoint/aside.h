// Aside does work on a thread of its own. If no thread can be started nothing
// is done, and status() says why.
#ifndef CHECKPOINT_SAVE_ASIDE_H_
#define CHECKPOINT_SAVE_ASIDE_H_

#include <functional>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/thread/monotonic_wait.h"
#include "base/thread/start_thread.h"
#include "base/torch_guard.h"

namespace tessera {

class Aside {
 public:
  explicit Aside(std::function<absl::Status()> work) : work_(std::move(work)) {
    auto thread = StartThread("tessera-disk", [this] {
      status_ = CatchTorch("checkpoint", work_);
      done_.Notify();
    });
    if (thread.ok()) {
      thread_ = *std::move(thread);
    } else {
      status_ = thread.status();
      done_.Notify();
    }
  }
  // Waits for the work.
  ~Aside() {
    if (thread_.joinable()) thread_.join();
  }
  Aside(const Aside&) = delete;
  Aside& operator=(const Aside&) = delete;

  // Waits for at most `wait`; returns whether the work is done.
  bool Done(absl::Duration wait) { return done_.WaitFor(wait); }
  // Waits for the work and returns its result.
  const absl::Status& status() const {
    done_.Wait();
    return status_;
  }

 private:
  const std::function<absl::Status()> work_;
  absl::Status status_;
  MonotonicNotification done_;
  std::thread thread_;
};

}  // namespace tessera
#endif  // CHECKPOINT_SAVE_ASIDE_H_
