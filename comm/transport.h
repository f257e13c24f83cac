// Transport: how one backend moves what the ranks of a group exchange, for the
// communicator of that group (comm/group/group_communicator.h), which has
// checked and recorded the call, and watches its wait.
//
//   AllGather(...) --> CommThread --> monitor --> Transport::Run(call)
//
// Calls are valid and not empty, and come one at a time, from one thread. One
// that works in host memory (Capabilities::device is false) sees tensors of the
// CPU alone. One that gives a collective to a device returns when that is done;
// what ends it there is TakeDeviceEnd's.
#ifndef COMM_TRANSPORT_H_
#define COMM_TRANSPORT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/capabilities.h"
#include "comm/comm_call.h"
#include "comm/communicator.h"
#include "comm/shared_memory.h"

namespace tessera {

// WaitListener: callbacks for a transport's waits.
struct WaitListener {
  std::vector<int> names;  // by rank: what it is called in messages
  // Called when the transport begins to wait for a message of `peer`; -1: it
  // waits for nobody.
  std::function<void(int peer)> awaited;
  // Called with how long the collective under way was blocked until something
  // of `peer` first arrived.
  std::function<void(int peer, absl::Duration)> waited;
  // Returns Unavailable if the process of `peer` has ended, or has left.
  std::function<absl::Status(int peer)> end_of;
  // Returns the first failure of all groups that fail together.
  std::function<absl::Status()> failure;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual absl::string_view name() const = 0;  // "shm", "gloo", ...
  virtual Capabilities capabilities() const = 0;
  // Sets the listener, before the first Run, and again where another
  // communicator takes over.
  virtual void Listen(WaitListener /*listener*/) {}

  // Runs a call; blocks until the result may be read by any thread, or with
  // tensors of a device by the later work of their current stream. Sums are
  // divided by call.divisor with the bits of DivideBy (base/torch/divide.h). An
  // error makes the group failed; FailedPrecondition means that ranks are in
  // different collectives. COLLECTIVE.
  virtual absl::Status Run(const CommCall& call) = 0;
  // Makes the current wait, and later ones, return soon. Any thread.
  virtual void Abort() {}

  // ---- of those that give collectives to a device

  // Returns which lane of the device a call takes. Calls of one lane follow
  // each other there; those of different lanes may run beside each other.
  virtual int LaneOf(const CommCall& /*call*/) const { return 0; }
  // Called once after each Run, whatever it returned. Returns null if nothing
  // was given to the device; else a function that blocks, on another thread,
  // until that is done and returns how it ended.
  virtual std::function<absl::Status()> TakeDeviceEnd() { return nullptr; }
  // Called when the device's work failed, or did not end; the group has failed.
  virtual void AbandonDevice(const absl::Status& /*why*/) {}

  // Carries out Communicator::ShareMemory for `group`, which runs over this.
  virtual absl::StatusOr<std::unique_ptr<SharedMemory>> ShareMemory(
      Communicator* group, int64_t bytes, const CommTag& tag) {
    return group->Communicator::ShareMemory(bytes, tag);
  }
};

}  // namespace tessera
#endif  // COMM_TRANSPORT_H_
