// Finds the user at the other end of a connection within this host. No torch.
#ifndef COMM_CONNECT_PEER_USER_H_
#define COMM_CONNECT_PEER_USER_H_

#include <sys/types.h>

#include <optional>

namespace tessera {

// Returns the user at the other end of `fd`, a TCP socket that is connected
// within this network namespace; nullopt for other sockets, for an end that no
// process has any more, or yet, and where the kernel does not say
// (NETLINK_SOCK_DIAG). LOCAL, microseconds.
std::optional<uid_t> PeerUser(int fd);

// Returns whether it is another user than this process's. False where that is
// not known.
bool OfAnotherUser(int fd);

}  // namespace tessera
#endif  // COMM_CONNECT_PEER_USER_H_
