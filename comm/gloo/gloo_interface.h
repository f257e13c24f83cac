// The network interface that GLOO_SOCKET_IFNAME names.
#ifndef COMM_GLOO_GLOO_INTERFACE_H_
#define COMM_GLOO_GLOO_INTERFACE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace tessera {

// An address of an interface of this host.
struct InterfaceAddress {
  std::string name;
  std::string address;  // numeric; "" if the interface has none
  bool up = false;
  bool loopback = false;
};

// Returns the interfaces of this host, in the kernel's order.
std::vector<InterfaceAddress> InterfacesHere();

// Whether Gloo can listen at the interface `name`, the value of
// GLOO_SOCKET_IFNAME, where other hosts reach it. InvalidArgument with the
// variable, its value, what is wrong with it, and `here`.
absl::Status CheckGlooInterface(const std::string& name,
                                const std::vector<InterfaceAddress>& here);

}  // namespace tessera
#endif  // COMM_GLOO_GLOO_INTERFACE_H_
