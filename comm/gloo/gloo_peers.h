// Checks that the peers that Gloo has connected with are the ranks of this job.
//
// Gloo believes whoever connects first and names a number that it awaits. So
// before any data each rank proves to each other one, over Gloo itself, that it
// knows a key from the job's secret and a token that stands in the store.
#ifndef COMM_GLOO_GLOO_PEERS_H_
#define COMM_GLOO_GLOO_PEERS_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "comm/gloo/gloo_links.h"

namespace tessera {

// COLLECTIVE over the ranks of `transport`, blocking. Returns PermissionDenied
// naming the rank in whose place somebody else is, Unavailable if a connection
// breaks. After an error messages may still be under way; what they point into
// is in `*memory` then, for GlooLinks::Abandon.
absl::Status ProvePeers(GlooLinks& transport, int rank, int world_size,
                        const std::string& token,
                        std::shared_ptr<void>* memory);

}  // namespace tessera
#endif  // COMM_GLOO_GLOO_PEERS_H_
