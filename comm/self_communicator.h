// The communicator of a world of one: copies, and no network.
#ifndef COMM_SELF_COMMUNICATOR_H_
#define COMM_SELF_COMMUNICATOR_H_

#include <memory>

#include "comm/communicator.h"

namespace tessera {

// LOCAL. Its collectives cannot fail.
std::shared_ptr<Communicator> MakeSelfCommunicator();

}  // namespace tessera
#endif  // COMM_SELF_COMMUNICATOR_H_
