// Handshake: how a rank finds another process of its job that listens, and how
// each of them proves to the other that it is of this job.
//
//   who listens    Listen() ---- where, through the store or a collective ---.
//                                                                            v
//   who connects   "tessera2" <nonce a, 16 bytes> <rank, 4 bytes> --->
//                  <--- <nonce b, 16> <hash of key, "listens", a, b, rank, 32>
//                  <hash of key, "connects", a, b, rank, 32> --->
//                  <--- 'k'
//                  'k' --->
//
// The key comes from the job's secret (comm/connect/job_secret.h) and what
// the one that listens has told its ranks. It is never sent, and a conversation
// that somebody has listened to is of no use in another. What follows is
// neither encrypted nor signed.
//
// Who connects gives up after some seconds; the one that listens, if it was
// busy meanwhile, finds a hello that nobody stands behind any more. So a rank
// is there only once it has taken the last answer, and said so.
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

// Where this rank listens. `fd` is the caller's; -1 if it cannot listen.
struct Listener {
  int fd = -1;
  std::string token;  // for JobKey; "" if it cannot listen
  // For those that shall connect, in one line; "" if it cannot listen.
  std::string where;
};

// Listens on the loopback, or wherever this host is reached. `network`: hosts
// with equal ones reach each other over the loopback; without spaces. LOCAL.
Listener Listen(bool loopback, int backlog, const std::string& network);

// What `Listener::where` says.
struct Endpoint {
  std::string token;  // "" if that rank cannot listen
  std::string port;
  std::vector<std::string> addresses;  // to be tried in this order
};

// For a rank in `network`, see Listen.
Endpoint ParseEndpoint(const std::string& where, const std::string& network);

// A connected, non-blocking socket whose other end has let `rank` in, or -1.
// The key is JobKey(purpose, endpoint.token). Takes 5 seconds at most for each
// address that takes connections, and 6 for all others.
int ConnectAs(int rank, const Endpoint& endpoint, absl::string_view purpose);

// For who connects: over `fd`, connected. Returns
//   PermissionDenied  the other end does not know the key
//   Unavailable       it has closed the connection
//   DeadlineExceeded  it says nothing
absl::Status Introduce(int fd, absl::string_view key, int rank,
                       Deadline deadline);

// For who listens: one connection's way through the handshake. Pure.
class Greeting {
 public:
  // `key` outlives this. Lets in ranks 0 to `world_size` - 1 except `own`.
  Greeting(absl::string_view key, int own, int world_size)
      : key_(key), own_(own), world_size_(world_size) {}

  // How many bytes come next; 0 once it is through. What follows is not the
  // handshake's.
  size_t wanted() const;
  // Takes some of them, `wanted` at most, and adds what is to be sent to
  // `*answer`. False: it is to be turned away.
  bool Take(absl::string_view bytes, std::string* answer);

  // It has proved that it knows the key.
  bool proven() const { return stage_ == kProven || stage_ == kThere; }
  // It is there, as `rank`.
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
