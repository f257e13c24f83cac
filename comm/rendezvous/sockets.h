// TCP sockets: to listen, to be found, to connect. All are closed on exec.
#ifndef COMM_RENDEZVOUS_SOCKETS_H_
#define COMM_RENDEZVOUS_SOCKETS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

// 32 random hex digits, by which a rank knows those that were told; "" if the
// system has none.
std::string RandomToken();

// A listening socket and its port, which the system chose, or -1. On the
// loopback, or wherever this host is reached.
int OpenListener(bool loopback, int backlog, uint16_t* port);

// Where other hosts may reach this one: numeric addresses, IPv4 and IPv6.
std::vector<std::string> Addresses();

// A connected, non-blocking socket, or -1 after a second. `host` and `port` are
// numeric.
int ConnectTo(const std::string& host, const std::string& port);

// The kernel asks now and then whether the other host is there, and breaks the
// connection about 20 seconds after it is not. Small messages are not delayed.
void KeepAlive(int fd);

// poll() of one socket; false if `timeout_ms` passed.
bool WaitForSocket(int fd, short events, int timeout_ms);

}  // namespace tessera
#endif  // COMM_RENDEZVOUS_SOCKETS_H_
