// CheckpointOptions: what is kept of a checkpointed region, and how it is
// checked.
#ifndef SHARDING_RECOMPUTE_CHECKPOINTED_CHECKPOINT_OPTIONS_H_
#define SHARDING_RECOMPUTE_CHECKPOINTED_CHECKPOINT_OPTIONS_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"

namespace tessera {

class Communicator;  // comm/communicator.h

struct CheckpointOptions {
  // The region's name in messages: "[blocks.3] ...".
  std::string name = "checkpoint";

  // What to keep; it does not apply to operators of a region within this one.
  enum class Policy {
    kFull,  // keeps nothing
    // Keeps the results of matrix products, convolutions and attention, and
    // does not recompute these.
    kKeepMatmuls,
  };
  Policy policy = Policy::kFull;
  // Keeps the results of further operators, by their names ("aten::mm", as
  // autograd sees them: below autocast, and none that is made of others). It
  // must give the same answer each time.
  std::function<bool(absl::string_view op_name)> keep;

  // Compares recomputed values with those of forward, by fingerprints. Sizes,
  // dtypes and the number of tensors are always compared.
  enum class Check {
    kFirst,  // of the first 64 regions of each function type in the process
    kAlways,
    kNever,
  };
  Check check = Check::kFirst;

  // Ends the second run as soon as all that backward needs is there, as
  // PyTorch's early_stop. What the function does after that is not done again:
  // one that changes state by calls and puts it back at its end (m->eval(); ...
  // m->train()) leaves it changed, unless this is false. Scopes (guards) are
  // ended, and autocast is put back, in either case. A whole run also counts
  // all that is saved.
  bool stop_early = true;

  // The ranks of this group give the same inputs to the region (they are ranks
  // of one tensor-parallel or sequence-parallel group): each keeps 1/n of the
  // elements of every floating input that is dense. Recomputation
  // begins with an exchange of fingerprints and one all-gather per such input,
  // COLLECTIVE: all ranks of the group must run the same backward.
  std::shared_ptr<Communicator> partition_over;

  // Keeps inputs that are on a device in pinned memory of the host. Nothing
  // for what is there already.
  bool keep_on_cpu = false;
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_CHECKPOINTED_CHECKPOINT_OPTIONS_H_
