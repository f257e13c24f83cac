// Opens TCP sockets that listen or connect. All are closed on exec and on fork
// (base/system/close_on_fork.h), so close them by CloseDescriptor. No torch.
#ifndef COMM_CONNECT_SOCKETS_H_
#define COMM_CONNECT_SOCKETS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tessera {

// Opens a listening, non-blocking socket at `*port`; 0: at one that the system
// chooses, which is written there. -1, with errno, on an error. It listens on
// the loopback, or on all interfaces.
int OpenListener(bool loopback, int backlog, uint16_t* port);

// Runs `open`, and returns the TCP sockets that listen since then; none of them
// is of OpenListener, which waits meanwhile.
std::vector<int> ListenersOf(const std::function<void()>& open);

// Makes `listener` accept no new connections, which are not answered then;
// existing ones stay. Returns false if that is not possible.
bool TakeNoMore(int listener);

// Returns the numeric addresses, IPv4 and IPv6, at which other hosts may reach
// this one.
std::vector<std::string> Addresses();

// Returns a connected, non-blocking socket, or -1 with errno: ETIMEDOUT after a
// second. `host` and `port` are numeric.
int ConnectTo(const std::string& host, const std::string& port);

// Makes the kernel probe the other host now and then, and break the connection
// about 20 seconds after it has gone. (TCP_USER_TIMEOUT would also break
// connections to a stopped process, which receives nothing.) Small messages are
// not delayed.
void KeepAlive(int fd);

// Close `*fd`, unless that is -1, and make it -1.
void CloseOnce(int* fd);

// Move what can be moved without blocking: what has come is added to `*in`,
// `most` bytes at most; what is sent is taken from `*out`. Return false once
// the connection is of no more use.
bool ReceiveSome(int fd, std::string* in, size_t most);
bool SendSome(int fd, std::string* out);

// Polls one socket; returns false if `timeout_ms` passed.
bool WaitForSocket(int fd, short events, int timeout_ms);

}  // namespace tessera
#endif  // COMM_CONNECT_SOCKETS_H_
