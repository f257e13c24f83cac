// Handshake: how a rank finds another process of its job that listens, and how
// both prove to each other that they belong to the job.
//
//   who listens    Listen() ---- where, through the store or a collective ---.
//                                                                            v
//   who connects   "tessera2" <nonce a, 16 bytes> <rank, 4 bytes> --->
//                  <--- <nonce b, 16> <hash of key, "listens", a, b, rank, 32>
//                  <hash of key, "connects", a, b, rank, 32> --->
//                  <--- 'k'
//                  'k' --->
//
// The key comes from the job's secret (comm/connect/job_secret.h) and what the
// listening process has told its ranks. It is never sent, and a conversation
// that somebody has overheard cannot be replayed. What follows the handshake is
// neither encrypted nor signed.
//
// A connecting process gives up after some seconds; the listening one, if it
// was busy meanwhile, may find the hello of a process that has given up. So a
// rank counts as connected only once it has acknowledged the last answer.
//
// Integers are little-endian. Threads: all calls may come from any thread.
#ifndef COMM_CONNECT_HANDSHAKE_H_
#define COMM_CONNECT_HANDSHAKE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/thread/deadline.h"

namespace tessera {

// Listener: where this rank listens. The caller owns `fd`; -1 if it cannot
// listen.
struct Listener {
  int fd = -1;
  std::string token;  // for JobKey; "" if it cannot listen
  // The address for ranks that connect, in one line; "" if it cannot listen.
  std::string where;
};

// Listens on the loopback, or on all interfaces. `network`: processes with
// equal ones reach each other over the loopback; without spaces. LOCAL.
Listener Listen(bool loopback, int backlog, const std::string& network);

// The parsed Listener::where.
struct Endpoint {
  std::string token;  // "" if that rank cannot listen
  std::string port;
  std::vector<std::string> addresses;  // to be tried in this order
};

// Parses Listener::where for a rank in `network`, see Listen.
Endpoint ParseEndpoint(const std::string& where, const std::string& network);

// Returns a connected, non-blocking socket whose other end has let `rank` in,
// or -1. The key is JobKey(purpose, endpoint.token). Takes at most 5 seconds
// for each address that accepts connections, and 6 for all others.
int ConnectAs(int rank, const Endpoint& endpoint, absl::string_view purpose);

// Carries out the connecting side's handshake over `fd`, which is connected.
// Returns
//   PermissionDenied  the other end does not know the key
//   Unavailable       it has closed the connection
//   DeadlineExceeded  it says nothing
absl::Status Introduce(int fd, absl::string_view key, int rank,
                       Deadline deadline);

// Greeting: the listening side's handshake for one connection. Pure.
class Greeting {
 public:
  // `key` outlives this. Lets in ranks 0 to `world_size` - 1 except `own`.
  Greeting(absl::string_view key, int own, int world_size)
      : key_(key), own_(own), world_size_(world_size) {}

  // Returns how many bytes come next; 0 once the handshake is complete. Later
  // bytes do not belong to it.
  size_t wanted() const;
  // Takes some of them, `wanted` at most, and adds what must be sent to
  // `*answer`. False: the connection must be refused.
  bool Take(absl::string_view bytes, std::string* answer);

  // Whether it has proved that it knows the key.
  bool proven() const { return stage_ == kProven || stage_ == kThere; }
  // Whether it is connected, as `rank`.
  bool there() const { return stage_ == kThere; }
  int rank() const { return rank_; }

 private:
  enum Stage { kHello, kAnswered, kProven, kThere };
  bool Understand(std::string* answer);

  absl::string_view key_;
  int own_, world_size_;
  Stage stage_ = kHello;
  int32_t rank_ = -1;
  std::string in_, theirs_, ours_;
};

}  // namespace tessera
#endif  // COMM_CONNECT_HANDSHAKE_H_
