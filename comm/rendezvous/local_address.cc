#include "comm/rendezvous/local_address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <memory>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace tessera {
namespace {

using Found = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// For datagrams; null if there is none.
Found Resolve(const std::string& host, int family, const char* port) {
  addrinfo hints = {};
  hints.ai_family = family;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), port, &hints, &found) != 0) found = nullptr;
  return {found, &freeaddrinfo};
}

// A datagram socket that is connected has an address and sends nothing.
std::string AddressToward(const addrinfo& to) {
  const int fd = socket(to.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return "";
  sockaddr_storage own = {};
  socklen_t length = sizeof(own);
  char text[NI_MAXHOST] = {};
  auto* const plain = reinterpret_cast<sockaddr*>(&own);
  const bool ok = connect(fd, to.ai_addr, to.ai_addrlen) == 0 &&
                  getsockname(fd, plain, &length) == 0 &&
                  getnameinfo(plain, length, text, sizeof(text), nullptr, 0,
                              NI_NUMERICHOST) == 0;
  close(fd);
  return ok ? text : "";
}

}  // namespace

std::string AddressToward(const std::string& host) {
  for (int family : {AF_INET, AF_INET6}) {
    const Found found = Resolve(host, family, "9");  // any port does
    for (const addrinfo* to = found.get(); to != nullptr; to = to->ai_next) {
      const std::string address = AddressToward(*to);
      if (!address.empty()) return address;
    }
  }
  return "";
}

bool IsThisHost(const std::string& host) {
  const Found found = Resolve(host, AF_UNSPEC, "0");
  for (const addrinfo* to = found.get(); to != nullptr; to = to->ai_next) {
    const int fd = socket(to->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    const bool bound = bind(fd, to->ai_addr, to->ai_addrlen) == 0;
    close(fd);
    if (bound) return true;
  }
  return false;
}

bool IsLoopback(const std::string& address) {
  return absl::StartsWith(address, "127.") || address == "::1";
}

std::string ChooseAddress(
    const std::vector<RankInfo>& infos, int rank,
    const std::function<std::string(const std::string&)>& toward) {
  const std::string& mine = infos[rank].address;
  if (!mine.empty() && !IsLoopback(mine)) return mine;
  for (const RankInfo& info : infos) {
    const bool here =
        info.host == infos[rank].host && info.network == infos[rank].network;
    if (here || info.address.empty() || IsLoopback(info.address)) continue;
    const std::string address = toward(info.address);
    if (!address.empty() && !IsLoopback(address)) return address;
  }
  return "";
}

std::string HostId() {
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  return absl::StrCat(boot_id, " ", name);
}

std::string NetworkId() {
  char name[64] = {};
  const ssize_t length = readlink("/proc/self/ns/net", name, sizeof(name) - 1);
  return absl::BytesToHexString(absl::StrCat(
      HostId(), " ", absl::string_view(name, std::max<ssize_t>(length, 0))));
}

}  // namespace tessera
