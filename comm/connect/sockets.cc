#include "comm/connect/sockets.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <ifaddrs.h>
#include <linux/filter.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "absl/base/const_init.h"
#include "absl/synchronization/mutex.h"
#include "base/system/close_on_fork.h"
#include "comm/connect/keyed_hash.h"

namespace tessera {
namespace {

constexpr int kConnectMs = 1000;
// Connections that nobody has taken yet. With fewer places strangers could fill
// them, and ranks would have to try again, a second later.
constexpr int kLeastBacklog = 128;

ABSL_CONST_INIT absl::Mutex g_listen_mutex(absl::kConstInit);

void SetOption(int fd, int level, int name, int value) {
  setsockopt(fd, level, name, &value, sizeof(value));
}

int NewSocket(int family) {
  return OpenCloseOnFork([&] {
    return socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  });
}

std::set<int> ListeningSockets() {
  std::set<int> found;
  DIR* const folder = opendir("/proc/self/fd");
  if (folder == nullptr) return found;
  while (const dirent* entry = readdir(folder)) {
    const int fd = atoi(entry->d_name);
    int listens = 0, protocol = 0;
    socklen_t size = sizeof(listens);
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 &&
        listens != 0 &&
        getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &size) == 0 &&
        protocol == IPPROTO_TCP) {
      found.insert(fd);
    }
  }
  closedir(folder);
  return found;
}

}  // namespace

void KeepAlive(int fd) {
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, 2);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPCNT, 5);
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
}

int OpenListener(bool loopback, int backlog, uint16_t* port) {
  absl::MutexLock lock(&g_listen_mutex);
  sockaddr_in6 any = {};
  any.sin6_family = AF_INET6;
  any.sin6_addr = in6addr_any;
  any.sin6_port = htons(*port);
  sockaddr_in v4 = {};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(*port);
  v4.sin_addr.s_addr = htonl(loopback ? INADDR_LOOPBACK : INADDR_ANY);
  for (bool v6 : {true, false}) {
    if (v6 && loopback) continue;
    const int fd = NewSocket(v6 ? AF_INET6 : AF_INET);
    if (fd < 0) continue;
    // A port is free again at once when who had it has ended.
    SetOption(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    if (v6) SetOption(fd, IPPROTO_IPV6, IPV6_V6ONLY, 0);
    const auto* address = v6 ? reinterpret_cast<const sockaddr*>(&any)
                             : reinterpret_cast<const sockaddr*>(&v4);
    sockaddr_in6 bound = {};
    socklen_t length = sizeof(bound);
    if (bind(fd, address, v6 ? sizeof(any) : sizeof(v4)) == 0 &&
        listen(fd, std::max(backlog, kLeastBacklog)) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &length) == 0) {
      // Ports are at the same place in both kinds of address.
      *port = ntohs(bound.sin6_port);
      return fd;
    }
    const int error = errno;
    CloseDescriptor(fd);
    errno = error;
    if (error == EADDRINUSE) return -1;
  }
  return -1;
}

std::vector<int> ListenersOf(const std::function<void()>& open) {
  absl::MutexLock lock(&g_listen_mutex);
  const std::set<int> before = ListeningSockets();
  open();
  std::vector<int> made;
  for (int fd : ListeningSockets()) {
    if (before.count(fd) == 0) made.push_back(fd);
  }
  return made;
}

// A filter sees what comes for a socket before TCP does; this one keeps nothing
// of it. Connections have their own.
bool TakeNoMore(int listener) {
  sock_filter nothing = {BPF_RET | BPF_K, 0, 0, 0};
  const sock_fprog program = {1, &nothing};
  if (setsockopt(listener, SOL_SOCKET, SO_ATTACH_FILTER, &program,
                 sizeof(program)) == 0) {
    return true;
  }
  // Some kernels refuse filters to ordinary users. Then only who signs its
  // packets (RFC 2385) with a key that nobody knows may come.
  tcp_md5sig nobody = {};
  socklen_t size = sizeof(nobody.tcpm_addr);
  if (getsockname(listener, reinterpret_cast<sockaddr*>(&nobody.tcpm_addr),
                  &size) != 0) {
    return false;
  }
  const sa_family_t family = nobody.tcpm_addr.ss_family;
  nobody.tcpm_addr = {};
  nobody.tcpm_addr.ss_family = family;
  nobody.tcpm_flags = TCP_MD5SIG_FLAG_PREFIX;  // of no bits: all addresses
  const std::string key = RandomBytes(32);
  nobody.tcpm_keylen = static_cast<uint16_t>(key.size());
  std::copy(key.begin(), key.end(), nobody.tcpm_key);
  return setsockopt(listener, IPPROTO_TCP, TCP_MD5SIG_EXT, &nobody,
                    sizeof(nobody)) == 0;
}

std::vector<std::string> Addresses() {
  std::vector<std::string> addresses;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return addresses;
  for (const ifaddrs* it = list; it != nullptr; it = it->ifa_next) {
    if (it->ifa_addr == nullptr || (it->ifa_flags & IFF_UP) == 0 ||
        (it->ifa_flags & IFF_LOOPBACK) != 0) {
      continue;
    }
    const int family = it->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    char host[NI_MAXHOST] = {};
    if (getnameinfo(
            it->ifa_addr,
            family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6),
            host, sizeof(host), nullptr, 0, NI_NUMERICHOST) == 0) {
      addresses.emplace_back(host);
    }
  }
  freeifaddrs(list);
  return addresses;
}

void CloseOnce(int* fd) {
  if (*fd >= 0) CloseDescriptor(*fd);
  *fd = -1;
}

bool ReceiveSome(int fd, std::string* in, size_t most) {
  char buffer[64 << 10];
  const ssize_t got =
      recv(fd, buffer, std::min(most, sizeof(buffer)), MSG_DONTWAIT);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  in->append(buffer, got);
  return got > 0;
}

bool SendSome(int fd, std::string* out) {
  while (!out->empty()) {
    const ssize_t sent =
        send(fd, out->data(), out->size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) return errno == EAGAIN || errno == EINTR;
    out->erase(0, sent);
  }
  return true;
}

bool WaitForSocket(int fd, short events, int timeout_ms) {
  pollfd item = {fd, events, 0};
  int ready = 0;
  do {
    ready = poll(&item, 1, timeout_ms);
  } while (ready < 0 && errno == EINTR);
  return ready > 0;
}

int ConnectTo(const std::string& host, const std::string& port) {
  addrinfo hints = {};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) {
    errno = EINVAL;
    return -1;
  }
  const int fd = NewSocket(found->ai_family);
  int error = fd < 0 ? errno : 0;
  if (fd >= 0 && connect(fd, found->ai_addr, found->ai_addrlen) != 0) {
    error = errno;
    socklen_t length = sizeof(error);
    if (error == EINPROGRESS && WaitForSocket(fd, POLLOUT, kConnectMs)) {
      getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    }
  }
  freeaddrinfo(found);
  if (error == 0) return fd;
  if (fd >= 0) CloseDescriptor(fd);
  errno = error == EINPROGRESS ? ETIMEDOUT : error;
  return -1;
}

}  // namespace tessera
