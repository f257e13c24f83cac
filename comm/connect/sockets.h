// TCP sockets: to listen, to be found, to connect. All are closed on exec and
// on fork (base/system/close_on_fork.h), so close them by CloseDescriptor. No
// torch.
#ifndef COMM_CONNECT_SOCKETS_H_
#define COMM_CONNECT_SOCKETS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tessera {

// A listening, non-blocking socket at `*port`, or at one that the system
// chooses and this writes there if it is 0; -1, with errno, if there is none.
// On the loopback, or wherever this host is reached.
int OpenListener(bool loopback, int backlog, uint16_t* port);

// Runs `open`, and returns the TCP sockets that listen since then; none of them
// is of OpenListener, which waits meanwhile.
std::vector<int> ListenersOf(const std::function<void()>& open);

// From now on `listener` takes no connection any more: those that were made
// stay, who comes anew is not answered. False if that cannot be had.
bool TakeNoMore(int listener);

// Where other hosts may reach this one: numeric addresses, IPv4 and IPv6.
std::vector<std::string> Addresses();

// A connected, non-blocking socket, or -1 with errno: ETIMEDOUT after a second.
// `host` and `port` are numeric.
int ConnectTo(const std::string& host, const std::string& port);

// The kernel asks now and then whether the other host is there, and breaks the
// connection about 20 seconds after it is not. (TCP_USER_TIMEOUT would break
// those to a stopped process too, which takes nothing.) Small messages are not
// delayed.
void KeepAlive(int fd);

// poll() of one socket; false if `timeout_ms` passed.
bool WaitForSocket(int fd, short events, int timeout_ms);

}  // namespace tessera
#endif  // COMM_CONNECT_SOCKETS_H_
