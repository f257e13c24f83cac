// Finds what differs between two checkpoints: tensors, their layouts and steps,
// the numbers of every state, and the ranks' own values. No torch.
#ifndef CHECKPOINT_EXCHANGE_DIFF_H_
#define CHECKPOINT_EXCHANGE_DIFF_H_

#include <ostream>
#include <string>

#include "absl/status/statusor.h"
#include "base/disk/file_system.h"
#include "checkpoint/exchange/rewrite.h"

namespace tessera {

// Writes a line to `out` for each difference and returns their number. How a
// run was sharded, its configuration and libtorch's version are not compared.
// All that both have is read and verified. LOCAL.
absl::StatusOr<int> DiffCheckpoints(const std::string& dir_a,
                                    const std::string& dir_b,
                                    const RewriteProgress& progress,
                                    std::ostream* out, FileSystem* files);

}  // namespace tessera
#endif  // CHECKPOINT_EXCHANGE_DIFF_H_
