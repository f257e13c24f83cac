// Which units have their optimizer states on a disk, and what streams through
// them there.
#ifndef ENGINE_SETUP_STATES_ON_DISK_H_
#define ENGINE_SETUP_STATES_ON_DISK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "offload/disk/swap_file.h"
#include "offload/update_stream.h"
#include "sharding/copy/flat_description.h"
#include "sharding/layout/flat_plan.h"

namespace tessera {

struct OffloadOptions {
  bool states = false;  // of the optimizer, to a disk
  double ratio = 1;     // of all elements
  SwapOptions swap;     // owner is set here
  UpdateStreamOptions stream;
  // Of one state of a unit, on a rank: less stays in memory, since a disk takes
  // as long for it as for more.
  int64_t min_state_bytes = 64 << 10;
};

// Chooses units from the model's end until they have `ratio` of its elements,
// of those that are sharded and large enough; opens this rank's file, and sets
// FlatParameterOptions::states_stream of the chosen. Null where none is.
// InvalidArgument if a unit is not on the CPU; what opening the file returns,
// the same on all ranks. COLLECTIVE.
absl::StatusOr<std::shared_ptr<UpdateStream>> PutStatesOnDisk(
    const OffloadOptions& options, absl::Span<const FlatPlan> flats,
    int shard_group_size, Communicator* comm,
    std::vector<FlatParameterOptions>* flat_options);

}  // namespace tessera
#endif  // ENGINE_SETUP_STATES_ON_DISK_H_
