// Why ask the kernel: a Unix socket would tell by itself (SO_PEERCRED), but a
// job that is started by hand meets at a TCP port, which every user of the host
// can connect with.
#include "comm/rendezvous/peer_user.h"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

namespace tessera {
namespace {

struct Question {
  nlmsghdr header;
  inet_diag_req_v2 body;
};

// The two ends as IPv4, also where an IPv6 socket carries it.
bool AsIpv4(const sockaddr_storage& address, sockaddr_in* v4) {
  if (address.ss_family == AF_INET) {
    memcpy(v4, &address, sizeof(*v4));
    return true;
  }
  if (address.ss_family != AF_INET6) return false;
  sockaddr_in6 v6;
  memcpy(&v6, &address, sizeof(v6));
  if (!IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) return false;
  *v4 = {};
  v4->sin_family = AF_INET;
  v4->sin_port = v6.sin6_port;
  memcpy(&v4->sin_addr, v6.sin6_addr.s6_addr + 12, sizeof(v4->sin_addr));
  return true;
}

bool IsLoopback(const sockaddr_in& address) {
  return ntohl(address.sin_addr.s_addr) >> 24 == 127;
}

// About the socket at `from` that is connected with `to`. The kernel looks for
// it as it would for a packet, so of IPv6 sockets too.
Question Ask(const sockaddr_in& from, const sockaddr_in& to) {
  Question question = {};
  question.header.nlmsg_len = sizeof(question);
  question.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.header.nlmsg_flags = NLM_F_REQUEST;
  question.body.sdiag_family = AF_INET;
  question.body.sdiag_protocol = IPPROTO_TCP;
  question.body.idiag_states = ~0u;
  question.body.id.idiag_sport = from.sin_port;
  question.body.id.idiag_dport = to.sin_port;
  question.body.id.idiag_src[0] = from.sin_addr.s_addr;
  question.body.id.idiag_dst[0] = to.sin_addr.s_addr;
  question.body.id.idiag_cookie[0] = INET_DIAG_NOCOOKIE;
  question.body.id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;
  return question;
}

std::optional<uid_t> Answer(const Question& question) {
  const int fd =
      socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
  if (fd < 0) return std::nullopt;
  alignas(nlmsghdr) char buffer[4096];
  ssize_t got = -1;
  // The kernel has answered when send returns.
  if (send(fd, &question, sizeof(question), 0) == sizeof(question)) {
    got = recv(fd, buffer, sizeof(buffer), MSG_DONTWAIT);
  }
  close(fd);
  nlmsghdr header;
  inet_diag_msg body;
  if (got < static_cast<ssize_t>(NLMSG_LENGTH(sizeof(body)))) {
    return std::nullopt;
  }
  memcpy(&header, buffer, sizeof(header));
  if (header.nlmsg_type != SOCK_DIAG_BY_FAMILY) return std::nullopt;
  memcpy(&body, buffer + NLMSG_HDRLEN, sizeof(body));
  return body.idiag_uid;
}

}  // namespace

std::optional<uid_t> PeerUser(int fd) {
  sockaddr_storage own = {}, peer = {};
  socklen_t own_size = sizeof(own), peer_size = sizeof(peer);
  sockaddr_in here, there;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_size) != 0 ||
      getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) != 0 ||
      !AsIpv4(own, &here) || !AsIpv4(peer, &there) || !IsLoopback(there)) {
    return std::nullopt;
  }
  return Answer(Ask(there, here));
}

bool OfAnotherUser(int fd) {
  const std::optional<uid_t> user = PeerUser(fd);
  return user.has_value() && *user != geteuid();
}

}  // namespace tessera
