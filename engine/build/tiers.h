// Chooses the units whose optimizer states, and parameters, are offloaded from
// the memory of their device, and makes what updates them there.
#ifndef ENGINE_BUILD_TIERS_H_
#define ENGINE_BUILD_TIERS_H_

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
#include "offload/activation_store.h"
#include "offload/disk/swap_file.h"
#include "offload/tiered_buffer.h"
#include "offload/update_stream.h"
#include "sharding/copy/flat_description.h"
#include "sharding/partition/flat_plan.h"

namespace tessera {

// What to offload where: the host is for units on a device, and means nothing
// for others; a disk is for stage 3.
struct OffloadOptions {
  Tier states = Tier::kMemory;  // of the optimizer, and masters
  double ratio = 1;             // of all elements
  // Also moves gradient shards of units whose states are on a disk. With states
  // on the host, they are always moved.
  bool gradients = false;
  Tier parameters = Tier::kMemory;  // shards of working copies
  // Number of elements of working copies on a rank that stay in memory and not
  // on a disk.
  int64_t max_in_memory = 0;
  bool updates = true;  // there is an optimizer: what is on a disk streams
  SwapOptions swap;     // owner is set here
  UpdateStreamOptions stream;
  double step_cores = 1;  // the part that step units of a device
  // Units are stepped before Step is called where its outcome can be predicted,
  // while at most early_bytes of new values wait in memory for it.
  bool early_step = false;
  int64_t early_bytes = 0;
  int optimizer_states = 2;  // per element
  // The least bytes of one state of a unit on a rank, or of its parameters,
  // that are moved: less stays in memory, since a disk takes as long for it as
  // for more.
  int64_t min_state_bytes = 64 << 10;
};

// Where the tensors that recomputed modules save for backward are kept until
// then: on the host for modules on a device, on a disk for those on the CPU.
struct ActivationOffload {
  Tier tier = Tier::kMemory;
  SwapOptions swap;         // owner is set here
  int64_t least_bytes = 1;  // less stays
};

// How much is offloaded.
struct Offloaded {
  int units = 0;
  int64_t numel = 0;  // of them, on a rank
};
struct TierChoice {
  Offloaded states, parameters;
  bool on_disk = false;        // some of it
  int64_t total_numel = 0;     // of all units, on a rank
  UpdateStreamOptions stream;  // what streams through what is on a disk
  int64_t early_bytes = 0;     // of memory, that early steps take at most

  bool any() const { return states.units + parameters.units > 0; }
};

// Returns whether masters have memory of their own, as
// FlatDescription::separate_masters does of a flat that exists. `on_cpu`: where
// it will be.
bool HasSeparateMasters(const FlatPlan& flat,
                        const FlatParameterOptions& options, bool on_cpu);

// Sets FlatParameterOptions::{states,gradients,parameters}_tier of units that
// are sharded and large enough, from the model's end: states until `ratio` of
// its elements is reached, parameters until max_in_memory elements are left,
// which stay on the host. `on_cpu`: where the units will be. LOCAL, identical
// on all ranks.
TierChoice ChooseTiers(const OffloadOptions& options,
                       absl::Span<const FlatPlan> flats, int group_size,
                       bool on_cpu,
                       std::vector<FlatParameterOptions>* flat_options);

// Calls ChooseTiers and makes the chosen units' FlatParameterOptions::stream,
// with this rank's file where there is a disk. Returns null where nothing is
// chosen. Errors are those of opening the file, identical on all ranks.
// COLLECTIVE.
absl::StatusOr<std::shared_ptr<UpdateStream>> PutInTiers(
    const OffloadOptions& options, absl::Span<const FlatPlan> flats,
    int group_size, Communicator* comm,
    std::vector<FlatParameterOptions>* flat_options);

// Opens a new file in swap.folder, which is made if it is not there. `key` is
// for messages. LOCAL.
absl::StatusOr<std::shared_ptr<SwapFile>> OpenSwapFile(SwapOptions swap,
                                                       int rank,
                                                       absl::string_view key);

// Makes the store for `options`; null where nothing is to be moved: the host is
// for modules on a device. The module's `buffers` stay. Unimplemented: a disk
// for a device. LOCAL.
absl::StatusOr<std::shared_ptr<ActivationStore>> MakeActivationStore(
    const ActivationOffload& options, const std::vector<at::Tensor>& buffers,
    at::Device device, int rank);

// Logs a note where activations are to be moved, but no module is named for it.
// LOCAL.
void NoteIfNoneMoves(const ActivationOffload& options);

bool AnyParametersElsewhere(const std::vector<FlatParameterOptions>& options);
// Returns InvalidArgument: `key` cannot be "on" where parameters are offloaded.
// Identical on all ranks.
absl::Status WithParametersElsewhere(absl::string_view key);

}  // namespace tessera
#endif  // ENGINE_BUILD_TIERS_H_
