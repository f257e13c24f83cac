// Whose process is at the other end of a connection within this host. No torch.
#ifndef COMM_CONNECT_PEER_USER_H_
#define COMM_CONNECT_PEER_USER_H_

#include <sys/types.h>

#include <optional>

namespace tessera {

// The user at the other end of `fd`, a TCP socket that is connected within this
// network namespace; nullopt for other sockets, for an end that nobody has any
// more, or yet, and where the kernel does not tell (NETLINK_SOCK_DIAG). LOCAL,
// microseconds.
std::optional<uid_t> PeerUser(int fd);

// It is another one than this process's. False where that cannot be told.
bool OfAnotherUser(int fd);

}  // namespace tessera
#endif  // COMM_CONNECT_PEER_USER_H_
