// CommThread: the one thread of a process that issues collectives.
//
//   caller --Post(work)--> [ work, ... ] --> "tessera-comm" --> CommFuture
//
// Where collectives are given to a device, a second thread watches their ends
// there, in the same order (OfDevices).
//
// Work runs in the order of Post, one piece at a time, without autograd. The
// thread starts with the first Post; Stop runs what is queued and joins it.
//
// Never fork a process after the first Post, except to exec at once.
//
// Threads: all calls may come from any thread, Post also from the communication
// thread itself. Waiting there for work that is queued behind is an error
// (checked).
#ifndef COMM_COMM_THREAD_H_
#define COMM_COMM_THREAD_H_

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "base/stream/stream_point.h"
#include "base/trace/exposed.h"
#include "c10/core/Stream.h"
#include "comm/communicator.h"

namespace tessera {

// The purpose of a CommFuture, for traces and messages.
struct CommPurpose {
  WaitReason reason = WaitReason::kOther;
  std::string what = "communication";
};

// What a CommFuture and the communication thread share.
struct CommFuture::State {
  CommPurpose purpose;  // set before it is shared
  absl::Mutex mutex;
  bool done ABSL_GUARDED_BY(mutex) = false;
  absl::Status status ABSL_GUARDED_BY(mutex);
  // Where the result is, in a stream's work.
  StreamPoint result ABSL_GUARDED_BY(mutex);
  // Memory that the device may still use: held until the first Wait, whose
  // stream is ordered after that use.
  std::shared_ptr<void> held ABSL_GUARDED_BY(mutex);
  std::optional<c10::Stream> caller ABSL_GUARDED_BY(mutex);
  // It is ended outside of the communication thread (comm/comm_promise.h),
  // which may then wait for it. Set before it is shared.
  bool ends_elsewhere = false;
  ~State();  // nobody has waited: as Wait, on the caller's stream
};

class CommThread {
 public:
  // How a piece of work ended.
  struct End {
    End() = default;
    End(absl::Status status)  // NOLINT: a status is one
        : status(std::move(status)) {}
    absl::Status status;
    StreamPoint result;                 // the result is there from here on
    std::shared_ptr<void> held;         // until a stream has come after that
    std::optional<c10::Stream> caller;  // the current one of who has posted
  };
  using Work = std::function<End()>;

  // Returns the process's communication thread. Never destroyed.
  static CommThread& Get();
  // Returns the thread for the ends of collectives on devices.
  static CommThread& OfDevices();

  explicit CommThread(std::string name = "tessera-comm")
      : name_(std::move(name)) {}
  CommThread(const CommThread&) = delete;
  CommThread& operator=(const CommThread&) = delete;

  // Queues `work`; the future ends with what it returns (or throws, as
  // CatchTorch maps it). `work` and all it holds is destroyed before the future
  // ends, on the communication thread. If that thread cannot be started the
  // future has ended with ResourceExhausted, and `work` was not run. LOCAL,
  // ASYNC.
  CommFuture Post(Work work, CommPurpose purpose = {});

  // Starts the thread, unless it runs. ResourceExhausted. LOCAL.
  absl::Status Start() ABSL_LOCKS_EXCLUDED(mutex_);

  // Makes work posted from now on run on the processor that its caller is on,
  // for ranks that have one processor each: the kernel leaves a thread where it
  // ran last, so the communication threads of all ranks could end up on one
  // rank's processor. LOCAL.
  void FollowCallers() { follows_ = true; }

  // Runs all that is queued, then ends the thread. A later Post starts another.
  // LOCAL, blocking. REQUIRES: not on the communication thread.
  void Stop();

  // Returns whether this is a communication thread.
  static bool IsCurrent();

 private:
  struct Item {
    Work work;
    std::shared_ptr<CommFuture::State> state;
    int cpu = -1;  // to run on; negative: any
  };
  void Run();
  bool Next(Item* item);
  absl::Status StartLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string name_;
  std::atomic<bool> follows_ = false;
  absl::Mutex mutex_;
  std::deque<Item> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mutex_);
};

// Ends the future that has this state; call it once.
void EndFuture(CommFuture::State& state, CommThread::End end);

// Returns a future that has ended already.
CommFuture DoneFuture(CommThread::End end);

}  // namespace tessera
#endif  // COMM_COMM_THREAD_H_
