// Shard servers whose engine has gone, while other ranks may still read from
// them: the last evaluation does not end at the same moment everywhere.
#ifndef COMM_RETIRED_SERVERS_H_
#define COMM_RETIRED_SERVERS_H_

#include <memory>

#include "absl/time/time.h"
#include "comm/shard_server.h"

namespace tessera {

// Keeps `server`, and `memory` that it serves, until nobody can ask for it any
// more (ShardServer::Retire). Returns as soon as that is so, or after
// `patience`. LOCAL.
void RetireServer(std::unique_ptr<ShardServer> server,
                  std::shared_ptr<void> memory, absl::Duration patience);

// Waits until there are none of this process, `timeout` at most; false if there
// still are some. LOCAL.
bool WaitForRetiredServers(absl::Duration timeout);

}  // namespace tessera
#endif  // COMM_RETIRED_SERVERS_H_
