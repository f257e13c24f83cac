// Aside does work on a thread of its own ("tessera-disk"). If no thread can be
// started nothing is done, and status() says why.
#ifndef CHECKPOINT_ASIDE_H_
#define CHECKPOINT_ASIDE_H_

#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/thread/monotonic_wait.h"
#include "base/thread/start_thread.h"
#include "base/torch_guard.h"

namespace tessera {

class Aside {
 public:
  // `what` is for the error of a `work` that throws.
  Aside(absl::string_view what, std::function<absl::Status()> work)
      : what_(what), work_(std::move(work)) {
    auto thread = StartThread("tessera-disk", [this] {
      status_ = CatchTorch(what_, work_);
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
  const std::string what_;
  const std::function<absl::Status()> work_;
  absl::Status status_;
  MonotonicNotification done_;
  std::thread thread_;
};

}  // namespace tessera
#endif  // CHECKPOINT_ASIDE_H_
