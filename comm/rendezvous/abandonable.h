// RunAbandonable: work that may never end, and is then left to itself.
#ifndef COMM_RENDEZVOUS_ABANDONABLE_H_
#define COMM_RENDEZVOUS_ABANDONABLE_H_

#include <functional>

#include "absl/status/status.h"

namespace tessera {

// Runs `work`, which may block for ever, on a thread of its own, until it
// returns or `stop` (called every few milliseconds) gives an error; then the
// thread is left to itself and that error returned. So `work` must own, or
// share, all that it uses. If the process calls exit while it still runs, the
// process ends at once, with its status and its output, but without destroying
// statics.
absl::Status RunAbandonable(std::function<absl::Status()> work,
                            const std::function<absl::Status()>& stop);

}  // namespace tessera
#endif  // COMM_RENDEZVOUS_ABANDONABLE_H_
