// SendAll: bytes of one rank, to all ranks.
#ifndef CHECKPOINT_SEND_ALL_H_
#define CHECKPOINT_SEND_ALL_H_

#include <cstdint>
#include <functional>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "comm/communicator.h"

namespace tessera {

// Sends `bytes` of rank `root` to all ranks. A rank where `read` or `write`
// fails still takes part, and its error is returned. The bytes go through
// `device`, in pieces. COLLECTIVE, blocking.
absl::Status SendAll(
    int64_t bytes, int root, at::Device device, Communicator* comm,
    const std::function<absl::Status(int64_t at, char* to, int64_t n)>& read,
    const std::function<absl::Status(int64_t at, absl::string_view)>& write);

}  // namespace tessera
#endif  // CHECKPOINT_SEND_ALL_H_
