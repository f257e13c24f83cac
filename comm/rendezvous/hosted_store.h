// HostedStore: the launcher's side of a rendezvous.
#ifndef COMM_RENDEZVOUS_HOSTED_STORE_H_
#define COMM_RENDEZVOUS_HOSTED_STORE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"

namespace c10d {
class Store;
}

namespace tessera {

// A store on a free port of this host's loopback, for
// those that know the job's secret.
class HostedStore {
 public:
  static absl::StatusOr<HostedStore> Start(int world_size);
  uint16_t port() const { return port_; }
  // What its ranks need to reach it, the job's secret included.
  std::vector<std::pair<std::string, std::string>> Environment() const;
  // Makes every rank that is still waiting in Meet, or connecting to its peers,
  // fail with Unavailable and `message`. The first message holds.
  void Fail(const std::string& message);
  bool HasCome(int rank) const;

 private:
  uint16_t port_ = 0;
  std::string secret_;
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace tessera
#endif  // COMM_RENDEZVOUS_HOSTED_STORE_H_
