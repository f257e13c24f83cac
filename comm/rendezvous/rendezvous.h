// Rendezvous: where the ranks of a job meet, and the store they meet in.
//
//   tcp://host:port   rank 0 hosts the store there (unless it is hosted by the
//                     job's launcher), the others connect. Only ranks of the
//                     job are let in (store_server.h)
//   file:///path      a file that all ranks see; must not exist before. For its
//                     user alone (comm/rendezvous/store_file.h)
//
// Keys in the store, all under "tessera/": world_size, came, came/<rank>,
// info/<rank>, failure (as of StatusToText), alive/<rank> (start_watch.h),
// comm/... (the communicator).
#ifndef COMM_RENDEZVOUS_RENDEZVOUS_H_
#define COMM_RENDEZVOUS_RENDEZVOUS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/thread/deadline.h"
#include "c10/util/intrusive_ptr.h"

namespace c10d {
class Store;
}

namespace tessera {

struct RendezvousPlace {
  std::string address;  // as given, for messages
  std::string host;     // tcp://
  uint16_t port = 0;
  std::string path;  // file://, empty otherwise
  // The launcher hosts the store (tcp://), so rank 0 must not.
  bool hosted_by_launcher = false;
  // It is c10d's TCPStore: torchrun hosts no other. It lets in everybody.
  bool is_tcp_store = false;
  // Goes before every key; keeps a restarted job apart from what it left.
  std::string key_prefix;
};

// Returns InvalidArgument for anything but the two forms above.
absl::StatusOr<RendezvousPlace> ParseRendezvous(absl::string_view address);

struct Meeting {
  c10::intrusive_ptr<c10d::Store> store;
  std::vector<std::string> infos;  // by rank, what each tells of itself
};

// Comes to `place` as `rank` and waits for the other ranks until `deadline`;
// each tells the others about itself, with the text that `info` returns, which
// is called once the store has been reached, on another thread: it must own all
// that it uses. COLLECTIVE, blocking. Returns
//   InvalidArgument   a rank that came twice, or with another world size
//   Unavailable       the host is not known, or not rank 0's; the port is in
//                     use; or the launcher saw a rank end
//   PermissionDenied  the file is not for this user alone; or what listens at
//                     the port is not of this job
//   DeadlineExceeded  naming the ranks that have not come; or, a second after
//                     the deadline, that the store does not answer
absl::StatusOr<Meeting> Meet(const RendezvousPlace& place, int rank,
                             int world_size, std::function<std::string()> info,
                             Deadline deadline);

// The store goes with the process of this rank.
bool IsStoreHost(const RendezvousPlace& place, int rank);

// The begin of every key.
inline constexpr char kStorePrefix[] = "tessera";
// In the store once `rank` has come.
std::string CameKey(int rank);

// Words for a store that does not answer: whose it is, and why that may be.
std::string SilentStore(const RendezvousPlace& place);

// While ranks connect, only libtorch's fatal messages are let through.
void MuteTorch(bool mute);

}  // namespace tessera
#endif  // COMM_RENDEZVOUS_RENDEZVOUS_H_
