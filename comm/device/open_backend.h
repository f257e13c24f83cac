// OpenBackend: a backend of c10d's that a group on a device uses, from its
// connection to its end, which is always explicit:
//
//   Close                  at a clean end: backend->shutdown()
//   AbandonFailedBackends  after a failure of the domain: backend->abort()
//
// The process keeps a list of those whose end has not come.
//
// Threads: all calls may come from any thread.
#ifndef COMM_DEVICE_OPEN_BACKEND_H_
#define COMM_DEVICE_OPEN_BACKEND_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/thread/deadline.h"
#include "base/thread/monotonic_wait.h"
#include "c10/core/Device.h"
#include "c10/util/intrusive_ptr.h"

namespace c10d {
class Backend;
}

namespace tessera {

class OpenBackend : public std::enable_shared_from_this<OpenBackend> {
 public:
  struct Options {
    std::string what;  // for messages: "nccl of rank 1 of 2 on cuda:1"
    c10::Device device = c10::kCUDA;
    absl::Duration patience;  // for its end
  };

  // Adds `backend`, which is connected and which nothing else uses, to the
  // list. LOCAL.
  static std::shared_ptr<OpenBackend> Add(
      Options options, c10::intrusive_ptr<c10d::Backend> backend);

  // REQUIRES: neither Close nor Drop was called.
  c10d::Backend* get() const { return backend_.get(); }
  // Returns whether its end has begun.
  bool ending() const { return begun_; }

  // `failure` returns the first failure of the domain; owns what it uses.
  void Listen(std::function<absl::Status()> failure);
  // Returns whether the domain has failed.
  bool has_failed() const;

  // Begins the end, as Close does, and leaves it to its thread. LOCAL.
  void Drop();
  // Ends it: cleanly, or by an abort if the domain has failed. Blocks at most
  // until `deadline`, then logs a warning; the backend is never destroyed then.
  // LOCAL. REQUIRES: nobody uses the backend.
  void Close(const Deadline& deadline);
  const Options& options() const { return options_; }

 private:
  friend absl::Status AbandonFailedBackends();

  OpenBackend(Options options, c10::intrusive_ptr<c10d::Backend> backend);
  // Ends it on a thread of its own. ResourceExhausted if there is none.
  // REQUIRES: this caller has set begun_.
  absl::Status Begin(bool abort);
  // Run on that thread.
  void Abort();
  void ShutDown();
  void NoteEnd();
  // Makes sure that the backend is never destroyed.
  void Keep() const;

  const Options options_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::atomic<bool> begun_{false}, late_{false};
  MonotonicNotification ended_;
  mutable absl::Mutex mutex_;
  std::function<absl::Status()> failure_ ABSL_GUARDED_BY(mutex_);
};

// Closes all that are listed, in the order in which they were added; blocks no
// longer than the longest patience among them. LOCAL. REQUIRES: no collective
// is under way.
void CloseOpenBackends();

// Aborts all that are listed whose domain has failed, at once: one may come to
// its end only with another. Those whose end has begun are left alone. Blocks
// for at most the longest patience, then returns DeadlineExceeded. They stay
// valid, for good. LOCAL.
absl::Status AbandonFailedBackends();

}  // namespace tessera
#endif  // COMM_DEVICE_OPEN_BACKEND_H_
