// Why an answer: a connection is made as soon as the other host's kernel has
// taken it, also if the port meanwhile belongs to another program. Only the
// answer tells that a rank of this job is there, so that who connects tries the
// next address otherwise.
//
// Why tokens are compared in constant time: else the time that a wrong one
// takes would tell a stranger how many of its first bytes are right.
#include "comm/rendezvous/handshake.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "comm/rendezvous/sockets.h"

namespace tessera {
namespace {

constexpr int kAnswerMs = 5000;

bool Equal(absl::string_view a, absl::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  }
  return difference == 0;
}

std::string Hello(const std::string& token, int32_t rank) {
  return absl::StrCat(
      token,
      absl::string_view(reinterpret_cast<const char*>(&rank), sizeof(rank)));
}

// Both for the answer and to say that it has come.
constexpr char kOk = 'k';

bool SayOk(int fd) {
  return send(fd, &kOk, 1, MSG_NOSIGNAL | MSG_DONTWAIT) == 1;
}

bool SayHello(int fd, const std::string& hello) {
  char answer = 0;
  return send(fd, hello.data(), hello.size(), MSG_NOSIGNAL) ==
             static_cast<ssize_t>(hello.size()) &&
         WaitForSocket(fd, POLLIN, kAnswerMs) && recv(fd, &answer, 1, 0) == 1 &&
         answer == kOk && SayOk(fd);
}

}  // namespace

// "<token> <port> <network> <address>...".
Listener Listen(bool loopback, int backlog, const std::string& network) {
  Listener listener;
  listener.token = RandomToken();
  uint16_t port = 0;
  if (!listener.token.empty()) {
    listener.fd = OpenListener(loopback, backlog, &port);
  }
  if (listener.fd >= 0) {
    listener.where =
        absl::StrCat(listener.token, " ", port, " ", network, " ",
                     loopback ? "" : absl::StrJoin(Addresses(), " "));
  }
  return listener;
}

Endpoint ParseEndpoint(const std::string& where, const std::string& network) {
  const std::vector<std::string> parts =
      absl::StrSplit(where, ' ', absl::SkipEmpty());
  Endpoint endpoint;
  if (parts.size() < 3) return endpoint;
  endpoint.token = parts[0];
  endpoint.port = parts[1];
  endpoint.addresses.assign(parts.begin() + 3, parts.end());
  if (parts[2] == network) {
    endpoint.addresses.insert(endpoint.addresses.begin(), "127.0.0.1");
  }
  return endpoint;
}

int ConnectAs(int rank, const Endpoint& endpoint) {
  for (const std::string& address : endpoint.addresses) {
    const int fd = ConnectTo(address, endpoint.port);
    if (fd < 0) continue;
    KeepAlive(fd);
    if (SayHello(fd, Hello(endpoint.token, rank))) return fd;
    close(fd);
  }
  return -1;
}

int RankOfHello(absl::string_view hello, absl::string_view token, int own,
                int world_size) {
  if (hello.size() != kHelloBytes || token.size() != kTokenBytes) return -1;
  int32_t rank = 0;
  memcpy(&rank, hello.data() + kTokenBytes, sizeof(rank));
  const bool known = Equal(hello.substr(0, kTokenBytes), token);
  return known && rank >= 0 && rank < world_size && rank != own ? rank : -1;
}

bool Greet(int fd, absl::string_view token, int own, int world_size,
           std::string* in, Greeting* greeting) {
  if (greeting->rank < 0) {
    if (in->size() < kHelloBytes) return true;
    const absl::string_view hello(in->data(), kHelloBytes);
    greeting->rank = RankOfHello(hello, token, own, world_size);
    if (greeting->rank < 0 || !SayOk(fd)) return false;
    in->erase(0, kHelloBytes);
  }
  if (!greeting->confirmed && !in->empty()) {
    if (in->front() != kOk) return false;
    in->erase(0, 1);
    greeting->confirmed = true;
  }
  return true;
}

}  // namespace tessera
