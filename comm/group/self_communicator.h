// The communicator of a group of one: copies, and no network.
#ifndef COMM_GROUP_SELF_COMMUNICATOR_H_
#define COMM_GROUP_SELF_COMMUNICATOR_H_

#include <memory>

#include "comm/communicator.h"
#include "comm/group_options.h"

namespace tessera {

// Its collectives cannot fail, unless its domain has. Of `options` only the
// name and the domain count. LOCAL.
std::shared_ptr<Communicator> MakeSelfCommunicator(
    const GroupOptions& options = {});

}  // namespace tessera
#endif  // COMM_GROUP_SELF_COMMUNICATOR_H_
