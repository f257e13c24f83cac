// A backend of c10d over a SlotExchange: what a DeviceTransport needs of one
// (comm/device/device_transport.h), in NCCL's manners, on any device. A
// collective is given to a stream of its own, after what the caller's current
// stream has been given; it is done when that stream is; wait() lets the
// caller's stream, not the host, wait for it.
//
// It has all-gathers, broadcasts, and all-to-alls of lists, whose parts are all
// of one length or empty, with one that is not on each rank; sums are made from
// all-to-alls, in the DeviceTransport.
#ifndef COMM_CUDA_IPC_SLOT_BACKEND_H_
#define COMM_CUDA_IPC_SLOT_BACKEND_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "c10/core/Stream.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/cuda_ipc/peer_memory.h"
#include "comm/cuda_ipc/slot_exchange.h"
#include "comm/transport.h"

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

// Where the ranks of a device meet: over the transport of their hosts, as a
// part of the collective that they are in, so that a rank which does not come
// is named as in any other. Threads: the communication thread's.
class HostMeeting {
 public:
  explicit HostMeeting(std::shared_ptr<Transport> host)
      : host_(std::move(host)) {}
  // For DeviceTransportOptions::on_agreed.
  void Begin(const CommCall& call) { call_ = TextsWithin(call, "", &texts_); }
  absl::Status Meet() { return host_->Run(call_); }

 private:
  const std::shared_ptr<Transport> host_;
  CommCall call_;
  std::vector<std::string> texts_;
};

}  // namespace tessera
#endif  // COMM_CUDA_IPC_SLOT_BACKEND_H_
