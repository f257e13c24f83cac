// Keeps shard servers whose engine has ended while other ranks may still read
// from them: the last evaluation does not end at the same moment everywhere.
#ifndef COMM_SERVE_RETIRED_SERVERS_H_
#define COMM_SERVE_RETIRED_SERVERS_H_

#include <functional>
#include <memory>

#include "absl/time/time.h"
#include "comm/shard_server.h"

namespace tessera {

// Keeps `server` until nobody can ask for anything any more
// (ShardServer::Retire); then calls `ended`, which may free what was served, on
// a thread of its own. Returns after that, or after `patience`; only
// after that if there is no thread left. LOCAL.
void RetireServer(std::unique_ptr<ShardServer> server,
                  std::function<void()> ended, absl::Duration patience);

// Waits until this process has no such servers, `timeout` at most; returns
// false if there still are some. LOCAL.
bool WaitForRetiredServers(absl::Duration timeout);

}  // namespace tessera
#endif  // COMM_SERVE_RETIRED_SERVERS_H_
