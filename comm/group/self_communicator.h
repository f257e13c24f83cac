// Makes the communicator of a group of one, which copies and uses no network.
#ifndef COMM_GROUP_SELF_COMMUNICATOR_H_
#define COMM_GROUP_SELF_COMMUNICATOR_H_

#include <memory>

#include "comm/communicator.h"
#include "comm/group_options.h"

namespace tessera {

// Its collectives cannot fail, unless its domain has. Only name and domain of
// `options` count. LOCAL.
std::shared_ptr<Communicator> MakeSelfCommunicator(
    const GroupOptions& options = {});

}  // namespace tessera
#endif  // COMM_GROUP_SELF_COMMUNICATOR_H_
