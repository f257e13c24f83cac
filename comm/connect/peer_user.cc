// Why ask the kernel: a Unix socket would tell by itself (SO_PEERCRED), but a
// job that is started by hand meets at a TCP port, which every user of the host
// can connect with.
#include "comm/connect/peer_user.h"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace tessera {
namespace {

constexpr uint8_t kListens = 10;  // the kernel's TCP_LISTEN

struct Question {
  nlmsghdr header;
  inet_diag_req_v2 body;
};

// An end of a connection as the kernel's question has it: IPv4 also where an
// IPv6 socket carries it.
struct End {
  int family = 0;
  uint16_t port = 0;  // network order, as the address
  uint32_t address[4] = {};
};

bool ReadEnd(const sockaddr_storage& from, End* end) {
  if (from.ss_family == AF_INET) {
    sockaddr_in v4;
    memcpy(&v4, &from, sizeof(v4));
    *end = {AF_INET, v4.sin_port, {v4.sin_addr.s_addr}};
    return true;
  }
  if (from.ss_family != AF_INET6) return false;
  sockaddr_in6 v6;
  memcpy(&v6, &from, sizeof(v6));
  *end = {AF_INET6, v6.sin6_port, {}};
  if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
    end->family = AF_INET;
    memcpy(end->address, v6.sin6_addr.s6_addr + 12, sizeof(uint32_t));
  } else {
    memcpy(end->address, &v6.sin6_addr, sizeof(end->address));
  }
  return true;
}

// About the socket at `from` that is connected with `to`. The kernel looks for
// it as it would for a packet, so of IPv6 sockets too that carry IPv4.
Question Ask(const End& from, const End& to) {
  Question question = {};
  question.header.nlmsg_len = sizeof(question);
  question.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.header.nlmsg_flags = NLM_F_REQUEST;
  question.body.sdiag_family = static_cast<uint8_t>(from.family);
  question.body.sdiag_protocol = IPPROTO_TCP;
  question.body.idiag_states = ~0u;
  question.body.id.idiag_sport = from.port;
  question.body.id.idiag_dport = to.port;
  memcpy(question.body.id.idiag_src, from.address, sizeof(from.address));
  memcpy(question.body.id.idiag_dst, to.address, sizeof(to.address));
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
  // Another socket that listens at that port; or one that nobody has any more,
  // or yet, which counts as root's.
  if (body.idiag_state == kListens || body.idiag_inode == 0) {
    return std::nullopt;
  }
  return body.idiag_uid;
}

}  // namespace

std::optional<uid_t> PeerUser(int fd) {
  sockaddr_storage own = {}, peer = {};
  socklen_t own_size = sizeof(own), peer_size = sizeof(peer);
  End here, there;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_size) != 0 ||
      getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) != 0 ||
      !ReadEnd(own, &here) || !ReadEnd(peer, &there) ||
      here.family != there.family) {
    return std::nullopt;
  }
  return Answer(Ask(there, here));
}

bool OfAnotherUser(int fd) {
  const std::optional<uid_t> user = PeerUser(fd);
  return user.has_value() && *user != geteuid();
}

}  // namespace tessera
