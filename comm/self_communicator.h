// The communicator of a group of one: copies, and no network.
#ifndef COMM_SELF_COMMUNICATOR_H_
#define COMM_SELF_COMMUNICATOR_H_

#include <memory>

#include "comm/communicator.h"
#include "comm/group_options.h"

namespace tessera {

// Its collectives cannot fail, unless its family has. Of `options` only the
// name and the family count. LOCAL.
std::shared_ptr<Communicator> MakeSelfCommunicator(
    const GroupOptions& options = {});

}  // namespace tessera
#endif  // COMM_SELF_COMMUNICATOR_H_
