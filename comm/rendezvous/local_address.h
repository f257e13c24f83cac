// The address at which other hosts reach this one. No torch.
//
// A host may have several interfaces, and its name often leads to the loopback
// (127.0.1.1 in Debian's /etc/hosts). So nobody is asked for a name: an address
// is that of the interface through which packets to the rendezvous host leave,
// by the kernel's routes. Rank 0's host may find the loopback there, since it
// is the rendezvous host itself; it takes the way to another rank's address.
#ifndef COMM_RENDEZVOUS_LOCAL_ADDRESS_H_
#define COMM_RENDEZVOUS_LOCAL_ADDRESS_H_

#include <functional>
#include <string>
#include <vector>

#include "comm/rendezvous/rank_info.h"

namespace tessera {

// The numeric address of this host from which it sends to `host` (a name or an
// address, IPv4 if it has both); "" if there is none. Sends nothing, but may
// ask the name service.
std::string AddressToward(const std::string& host);

// Whether `host` (a name or an address) leads to this host: a socket can be
// bound there. Sends nothing, but may ask the name service.
bool IsThisHost(const std::string& host);

// Whether the address is in 127.0.0.0/8 or is ::1.
bool IsLoopback(const std::string& address);

// The address for `rank` to be reached at by all others, from the addresses in
// their infos and `toward` (AddressToward); "" if none of these holds one that
// another host could use.
std::string ChooseAddress(
    const std::vector<RankInfo>& infos, int rank,
    const std::function<std::string(const std::string&)>& toward);

// Returns a text that all processes of a running host share, and no others.
std::string HostId();

// Names the network of this process, without spaces: the same for processes
// that reach each other over the loopback of one host, others on other hosts
// and in other network namespaces.
std::string NetworkId();

}  // namespace tessera
#endif  // COMM_RENDEZVOUS_LOCAL_ADDRESS_H_
