// GlooLinks: messages between the ranks of a group, over c10d's Gloo.
//
// It uses only point-to-point messages of c10d's ProcessGroupGloo: they read
// and write slices of the user's tensors in place, where its collectives want
// whole, packed tensors; and they can be aborted, where its collectives cannot.
// Between two ranks, messages of one tag keep their order; tags never mix.
//
// Threads: one thread sends, receives and waits; Abort may come from any.
#ifndef COMM_GLOO_GLOO_LINKS_H_
#define COMM_GLOO_GLOO_LINKS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/group_options.h"

namespace c10d {
class Store;
class ProcessGroupGloo;
class Work;
}  // namespace c10d

namespace tessera {

struct GlooTransportOptions : GroupOptions {
  // All ranks run on this host; then only the loopback is listened on.
  bool same_host = true;
  // The address at which the other ranks reach this host; "" leaves it to Gloo,
  // which asks the name service. Not used on the same host.
  std::string address;
};

class GlooLinks {
 public:
  struct Message;  // one send or receive under way

  // Connects all ranks with all, has them prove that they belong to this job
  // (gloo_peers.h), and then accepts no more connections. On several hosts it
  // listens at the interface that GLOO_SOCKET_IFNAME names, or at
  // options.address, or at the address of this host's name. COLLECTIVE,
  // blocking. Returns Unavailable if the network or the store fails,
  // PermissionDenied if somebody else has connected, InvalidArgument if the
  // variable's value is no such interface. `store` is cloned.
  static absl::StatusOr<std::shared_ptr<GlooLinks>> Connect(
      const c10::intrusive_ptr<c10d::Store>& store,
      const GlooTransportOptions& options);

  ~GlooLinks();

  // Start to move the bytes of contiguous CPU tensor `t`, which must stay alive
  // until the message's Wait has returned OK. LOCAL, ASYNC.
  std::shared_ptr<Message> Send(at::Tensor t, int peer, uint32_t tag);
  std::shared_ptr<Message> Receive(at::Tensor t, int peer, uint32_t tag);

  // Blocks until `message` is done. Returns Unavailable naming the peer if its
  // connection broke, Cancelled after Abort.
  absl::Status Wait(Message& message);

  static int PeerOf(const Message& message);
  // Returns the number of `rank` in messages.
  int NameOf(int rank) const { return names_.empty() ? rank : names_[rank]; }

  // Makes every current and later Wait return. LOCAL.
  void Abort();

  // Keeps `transport`, its messages and `memory` (which the messages point
  // into) until the process ends: after a failure Gloo's own thread may still
  // write messages, and closing the group could block.
  static void Abandon(std::shared_ptr<GlooLinks> transport,
                      std::shared_ptr<void> memory);

 private:
  GlooLinks();
  using Tensors = std::vector<at::Tensor>;
  using Work = c10::intrusive_ptr<c10d::Work>;
  std::shared_ptr<Message> Start(at::Tensor t, int peer,
                                 const std::function<Work(Tensors&)>& start);

  c10::intrusive_ptr<c10d::ProcessGroupGloo> group_;
  std::vector<int> names_;
  absl::Mutex mutex_;
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::shared_ptr<Message>> pending_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
#endif  // COMM_GLOO_GLOO_LINKS_H_
