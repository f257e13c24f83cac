// CommPromise: a CommFuture that somebody else than the communication thread
// ends. A collective may wait for it (CommTag::ready).
#ifndef COMM_COMM_PROMISE_H_
#define COMM_COMM_PROMISE_H_

#include <memory>

#include "absl/status/status.h"
#include "comm/comm_thread.h"
#include "comm/communicator.h"

namespace tessera {

class CommPromise {
 public:
  CommPromise() : state_(std::make_shared<CommFuture::State>()) {
    state_->ends_elsewhere = true;
  }
  CommFuture future() const { return CommFuture(state_); }
  // Once. The values that it is about are there for all threads. LOCAL.
  void End(const absl::Status& status) { EndFuture(*state_, status); }

 private:
  std::shared_ptr<CommFuture::State> state_;
};

}  // namespace tessera
#endif  // COMM_COMM_PROMISE_H_
