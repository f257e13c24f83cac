// The store in which the ranks of a job meet, as c10d's transports want it: a
// c10d::Store whose server is comm/rendezvous/store_server.h.
//
// Each call waits for the answer as long as getTimeout() says, `get` and `wait`
// for their keys too; then it throws, as it does when the server is gone
// (c10::DistStoreError). Clones are connections of their own; calls over one
// wait for each other.
#ifndef COMM_RENDEZVOUS_STORE_CLIENT_H_
#define COMM_RENDEZVOUS_STORE_CLIENT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/thread/deadline.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/rendezvous/store_messages.h"
#include "comm/rendezvous/store_server.h"

namespace c10d {
class Store;
}

namespace tessera {

struct StoreClientOptions {
  std::string host;  // a name, or a numeric address
  uint16_t port = 0;
  std::string key;
  int rank = 0;
  // Kept as long as there are clients; null if another process hosts it.
  std::shared_ptr<StoreServer> server;
};

// Connects until `deadline`, trying again where nobody listens yet, or the name
// of the host is not known yet. Asks the name service at each try, unless the
// host is numeric. Blocking. Returns
//   NotFound            the host's name is not known
//   PermissionDenied    who listens there does not know the key
//   ResourceExhausted   this process may open no more files
//   FailedPrecondition  loopback is down
//   Aborted             it turned this rank away until the deadline
//   DeadlineExceeded    nobody listens there, or it does not answer
absl::StatusOr<c10::intrusive_ptr<c10d::Store>> ConnectStore(
    const StoreClientOptions& options, Deadline deadline);

}  // namespace tessera
#endif  // COMM_RENDEZVOUS_STORE_CLIENT_H_
