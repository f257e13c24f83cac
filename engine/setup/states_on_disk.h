// Which units have their optimizer states on a disk, and their parameters, and
// what streams through them there.
#ifndef ENGINE_SETUP_STATES_ON_DISK_H_
#define ENGINE_SETUP_STATES_ON_DISK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "offload/disk/swap_file.h"
#include "offload/update_stream.h"
#include "sharding/copy/flat_description.h"
#include "sharding/layout/flat_plan.h"

namespace tessera {

struct OffloadOptions {
  bool states = false;        // of the optimizer, and masters, to a disk
  double ratio = 1;           // of all elements
  bool gradients = false;     // shards of them, of units whose states are there
  bool parameters = false;    // shards of working copies, to a disk
  int64_t max_in_memory = 0;  // elements of these on a rank that stay in memory
  SwapOptions swap;           // owner is set here
  UpdateStreamOptions stream;
  // Of one state of a unit, on a rank, or of its parameters: less stays in
  // memory, since a disk takes as long for it as for more.
  int64_t min_state_bytes = 64 << 10;
};

// What lies on a disk, of which `units` are some of all.
struct OnDisk {
  int units = 0;
  int64_t numel = 0;  // of them, on a rank
};
struct DiskChoice {
  OnDisk states, parameters;
  int64_t total_numel = 0;     // of all units, on a rank
  UpdateStreamOptions stream;  // what streams through them

  bool any() const { return states.units + parameters.units > 0; }
};

// Sets states_on_disk and parameters_on_disk of units from the model's end: of
// the states until they have `ratio` of its elements, of the parameters until
// max_in_memory elements are left; of those that are sharded (at stage 3) and
// large enough. LOCAL, the same on all ranks.
DiskChoice ChooseOnDisk(const OffloadOptions& options,
                        absl::Span<const FlatPlan> flats, int shard_group_size,
                        std::vector<FlatParameterOptions>* flat_options);

// The same, and opens this rank's file for them, FlatParameterOptions::stream.
// Null where nothing is chosen. What opening the file returns, the same on all
// ranks. REQUIRES: the units are on the CPU. COLLECTIVE.
absl::StatusOr<std::shared_ptr<UpdateStream>> PutOnDisk(
    const OffloadOptions& options, absl::Span<const FlatPlan> flats,
    int shard_group_size, Communicator* comm,
    std::vector<FlatParameterOptions>* flat_options);

bool AnyParametersOnDisk(const std::vector<FlatParameterOptions>& options);
// InvalidArgument: `key`, which is "on", cannot be had with these. The same on
// all ranks.
absl::Status WithParametersOnDisk(absl::string_view key);

// Unimplemented naming `key` if a parameter is not on the CPU. LOCAL.
absl::Status CheckOnCpu(absl::string_view key,
                        absl::Span<const at::Tensor> parameters);

}  // namespace tessera
#endif  // ENGINE_SETUP_STATES_ON_DISK_H_
