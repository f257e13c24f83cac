// Finds what differs between two checkpoints: tensors, their layouts and steps,
// the numbers of every state, and the ranks' own values. No torch.
#ifndef CHECKPOINT_EXCHANGE_DIFF_H_
#define CHECKPOINT_EXCHANGE_DIFF_H_

#include <cstddef>
#include <limits>
#include <ostream>
#include <string>

#include "absl/status/statusor.h"
#include "base/disk/file_system.h"
#include "checkpoint/exchange/rewrite.h"

namespace tessera {

struct DiffOptions {
  RewriteProgress progress;
  // What differs in the same way has one line: "a.weight and 62 more: ...".
  bool together = true;
  size_t most_lines = std::numeric_limits<size_t>::max();
};

// Writes to `out` how many states are equal, then a line for each difference,
// and returns their number. How a run was sharded, its configuration and
// libtorch's version are not compared. All that both have is read and verified.
// LOCAL.
absl::StatusOr<int> DiffCheckpoints(const std::string& dir_a,
                                    const std::string& dir_b,
                                    const DiffOptions& options,
                                    std::ostream* out, FileSystem* files);

}  // namespace tessera
#endif  // CHECKPOINT_EXCHANGE_DIFF_H_
