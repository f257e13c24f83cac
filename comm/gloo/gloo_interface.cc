#include "comm/gloo/gloo_interface.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace tessera {
namespace {

std::string Numeric(const sockaddr* address) {
  const socklen_t size = address->sa_family == AF_INET ? sizeof(sockaddr_in)
                                                       : sizeof(sockaddr_in6);
  char text[NI_MAXHOST] = {};
  return getnameinfo(address, size, text, sizeof(text), nullptr, 0,
                     NI_NUMERICHOST) == 0
             ? text
             : "";
}

// "cable (10.77.0.2), lo (127.0.0.1, ::1)".
std::string Describe(const std::vector<InterfaceAddress>& here) {
  std::map<std::string, std::vector<std::string>> addresses;
  for (const InterfaceAddress& at : here) {
    std::vector<std::string>& of = addresses[at.name];
    if (!at.up && of.empty()) of.push_back("down");
    if (!at.address.empty()) of.push_back(at.address);
  }
  if (addresses.empty()) return "no interface";
  return absl::StrJoin(addresses, ", ", [](std::string* out, const auto& it) {
    absl::StrAppend(
        out, it.first, " (",
        it.second.empty() ? "no address" : absl::StrJoin(it.second, ", "), ")");
  });
}

std::string WhatIsWrong(const std::string& name,
                        const std::vector<InterfaceAddress>& here) {
  if (name.find_first_of("^,=") != std::string::npos) {
    return "it takes the name of one interface, no list, exclusion or exact "
           "match as NCCL_SOCKET_IFNAME does";
  }
  const auto is_it = [&](const InterfaceAddress& at) {
    return at.name == name;
  };
  const auto found = std::find_if(here.begin(), here.end(), is_it);
  if (found == here.end()) return "this host has no interface of that name";
  if (found->loopback) {
    return "the loopback leads to this host alone, and the ranks are on "
           "several hosts";
  }
  if (!found->up) return "that interface is down";
  const bool has_address =
      std::any_of(here.begin(), here.end(), [&](const InterfaceAddress& at) {
        return is_it(at) && !at.address.empty();
      });
  return has_address ? "" : "that interface has no address";
}

}  // namespace

std::vector<InterfaceAddress> InterfacesHere() {
  std::vector<InterfaceAddress> here;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return here;
  for (const ifaddrs* it = list; it != nullptr; it = it->ifa_next) {
    InterfaceAddress& at = here.emplace_back();
    at.name = it->ifa_name;
    at.up = (it->ifa_flags & IFF_UP) != 0;
    at.loopback = (it->ifa_flags & IFF_LOOPBACK) != 0;
    if (it->ifa_addr != nullptr && (it->ifa_addr->sa_family == AF_INET ||
                                    it->ifa_addr->sa_family == AF_INET6)) {
      at.address = Numeric(it->ifa_addr);
    }
  }
  freeifaddrs(list);
  return here;
}

absl::Status CheckGlooInterface(const std::string& name,
                                const std::vector<InterfaceAddress>& here) {
  const std::string wrong = WhatIsWrong(name, here);
  if (wrong.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "GLOO_SOCKET_IFNAME is '", name, "': ", wrong, "; this host has ",
      Describe(here),
      "; set it to the one that leads to the other hosts, or unset it to have "
      "the one from which this host reaches the rendezvous"));
}

}  // namespace tessera
