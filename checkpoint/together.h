// RunTogether does work of every rank on its own disk, which may take any time.
#ifndef CHECKPOINT_TOGETHER_H_
#define CHECKPOINT_TOGETHER_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "comm/communicator.h"

namespace tessera {

// Runs `work` on a thread of its own on every rank, and returns the error of
// the lowest rank that failed, the same on all. Meanwhile ranks meet every half
// second: a disk that is slow, or far slower than another's, does not look like
// a rank that has stopped, whatever the communicator's timeout; a rank that
// ends or stops is noticed as everywhere else. After an error of the
// communicator it still waits for its own `work`. `what` is for messages.
// COLLECTIVE, blocking.
absl::Status RunTogether(Communicator* comm, absl::string_view what,
                         const std::function<absl::Status()>& work);

}  // namespace tessera
#endif  // CHECKPOINT_TOGETHER_H_
