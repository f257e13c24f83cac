// A backend of c10d over a SlotExchange: what a DeviceCommunicator needs of one
// (comm/nccl/device_communicator.h), in NCCL's manners, on any device. A
// collective is given to a stream of its own, after what the caller's current
// stream has been given; it is done when that stream is; wait() lets the
// caller's stream, not the host, wait for it.
//
// It has all-gathers, all-to-alls of lists, and broadcasts; sums are made from
// all-to-alls, in the DeviceCommunicator.
#ifndef COMM_CUDA_IPC_SLOT_BACKEND_H_
#define COMM_CUDA_IPC_SLOT_BACKEND_H_

#include <memory>
#include <string>

#include "c10/core/Stream.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/cuda_ipc/peer_memory.h"
#include "comm/cuda_ipc/slot_exchange.h"
#include "comm/group/queued_communicator.h"

namespace c10d {
class Backend;
}

namespace tessera {

// `memory` is given its work on `stream`. Collectives throw a StatusException
// where `meet` or `memory` fail; the current stream comes after what was given
// to the device until then, too. abort() blocks until the device has done what
// it was given. Threads: collectives one at a time; abort() from any.
c10::intrusive_ptr<c10d::Backend> MakeSlotBackend(
    std::string name, std::shared_ptr<PeerMemory> memory, c10::Stream stream,
    Meeting meet);

// Where the ranks of a device group meet: in its host group, as a part of the
// collective that they are in, so that a rank which does not come is named as
// in any other. Threads: the communication thread's.
class HostMeeting {
 public:
  explicit HostMeeting(std::shared_ptr<QueuedCommunicator> host)
      : host_(std::move(host)) {}
  // For DeviceCommunicatorOptions::on_agreed.
  void Begin(const QueuedCommunicator::Call& call) { call_ = call; }
  absl::Status Meet() { return host_->DoAllGatherStrings(call_, "").status(); }

 private:
  const std::shared_ptr<QueuedCommunicator> host_;
  QueuedCommunicator::Call call_;
};

}  // namespace tessera
#endif  // COMM_CUDA_IPC_SLOT_BACKEND_H_
