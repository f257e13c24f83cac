// StoreServer: hosts the job's store, on a thread of its own ("tessera-host").
//
// c10d's TCPStore cannot do it: it listens on all interfaces, answers anybody,
// looks up the name of whoever connects, and keeps whatever a stranger sends.
// Here only those are answered that know the job's secret, or, where it has
// none, this host's connections are of this user (comm/connect/reception.h).
// No torch.
#ifndef COMM_RENDEZVOUS_STORE_SERVER_H_
#define COMM_RENDEZVOUS_STORE_SERVER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "comm/connect/reception.h"
#include "comm/rendezvous/store_table.h"

namespace tessera {

// The purpose of the key (job_secret.h); its words are the job's, which
// distinguish jobs that share a port and a secret.
inline constexpr char kStorePurpose[] = "store";

class StoreServer {
 public:
  struct Options {
    bool loopback = false;  // where it listens; otherwise on all interfaces
    uint16_t port = 0;      // 0: a free one
    int world_size = 0;     // how many ranks will come
    std::string key;        // JobKey(kStorePurpose, ...)
  };

  // Returns AlreadyExists if the port is in use, Unavailable if there is no
  // socket, ResourceExhausted if there is no thread. LOCAL.
  static absl::StatusOr<std::unique_ptr<StoreServer>> Start(
      const Options& options);
  // Closes all connections.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  uint16_t port() const { return port_; }

 private:
  struct Client {
    int fd = -1;
    std::string in, out;  // not understood yet; not sent yet
  };

  StoreServer() = default;
  void Run();
  // False once the connection is of no more use.
  bool Read(StoreTable::Client id, Client* client);
  static bool Write(Client* client);
  void Close(StoreTable::Client id);

  uint16_t port_ = 0;
  int listen_fd_ = -1;
  int stop_fd_ = -1;  // an eventfd
  // Used by the thread only.
  std::unique_ptr<Reception> reception_;
  StoreTable table_;
  std::map<StoreTable::Client, Client> clients_;
  StoreTable::Client ids_ = 0;
  std::thread thread_;
};

}  // namespace tessera
#endif  // COMM_RENDEZVOUS_STORE_SERVER_H_
