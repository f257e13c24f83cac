// CommPromise: makes a CommFuture that is ended outside of the communication
// thread. A collective may wait for it (CommTag::ready).
#ifndef COMM_COMM_PROMISE_H_
#define COMM_COMM_PROMISE_H_

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "base/stream/stream_point.h"
#include "comm/comm_thread.h"
#include "comm/communicator.h"

namespace tessera {

class CommPromise {
 public:
  explicit CommPromise(CommPurpose purpose = {WaitReason::kUpdate,
                                              "own update"})
      : state_(std::make_shared<CommFuture::State>()) {
    state_->ends_elsewhere = true;
    state_->purpose = std::move(purpose);
  }
  CommFuture future() const { return CommFuture(state_); }
  // Ends the future; call it once. The values are there for all threads, those
  // of a device from `result` on, which waiters' streams wait for. LOCAL.
  void End(const absl::Status& status, StreamPoint result = {}) {
    CommThread::End end(status);
    end.result = std::move(result);
    EndFuture(*state_, std::move(end));
  }

 private:
  std::shared_ptr<CommFuture::State> state_;
};

}  // namespace tessera
#endif  // COMM_COMM_PROMISE_H_
