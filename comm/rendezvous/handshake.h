// Handshake: how a rank finds another rank that listens, and shows that it is
// of the same job.
//
//   who listens    Listen() ---- where, through the store or a collective ---.
//                                                                            v
//   who connects   <token, 32 bytes> <rank, 4 bytes, little-endian> --->
//                  <--- 'k'
//                  'k' --->
//
// Who connects gives up after some seconds; the one that listens, if it was
// busy meanwhile, finds a hello that nobody stands behind any more. So a rank
// is there only once it has taken the answer, and said so.
//
// Anybody who can reach the port can connect, but only ranks of the job were
// told the token: others are turned away before anything they sent is used.
//
// Threads: all calls may come from any thread.
#ifndef COMM_RENDEZVOUS_HANDSHAKE_H_
#define COMM_RENDEZVOUS_HANDSHAKE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tessera {

inline constexpr size_t kTokenBytes = 32;  // of RandomToken
inline constexpr size_t kHelloBytes = kTokenBytes + sizeof(int32_t);

// Where this rank listens. `fd` is the caller's; -1 if it cannot listen.
struct Listener {
  int fd = -1;
  std::string token;
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
// Takes seconds at most for each address.
int ConnectAs(int rank, const Endpoint& endpoint);

// For who listens: the rank that `hello`, of kHelloBytes, comes from; -1 if its
// token is not `token`, or it cannot be another rank than `own` of
// `world_size`.
int RankOfHello(absl::string_view hello, absl::string_view token, int own,
                int world_size);

// How far who listens is with one connection.
struct Greeting {
  int rank = -1;           // after its hello
  bool confirmed = false;  // it is there
};
// For who listens: takes what is there of the handshake from the front of `in`,
// all that has come over `fd` and was not taken, and answers. False: it is to
// be turned away.
bool Greet(int fd, absl::string_view token, int own, int world_size,
           std::string* in, Greeting* greeting);

}  // namespace tessera
#endif  // COMM_RENDEZVOUS_HANDSHAKE_H_
