// TrainingState: what a checkpoint of an engine holds, and in which order it is
// saved and loaded. Bytes go through checkpoint/checkpoint.h;
// engine/checkpoint/state_table.h says which storage belongs to what.
#ifndef ENGINE_CHECKPOINT_TRAINING_STATE_H_
#define ENGINE_CHECKPOINT_TRAINING_STATE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/save/pending_save.h"
#include "engine/api/engine_types.h"
#include "engine/api/run_place.h"
#include "engine/model/optimization.h"
#include "engine/model/optimizer_groups.h"
#include "engine/model/sharded_model.h"

namespace tessera {

namespace proto {
class Config;
}

// All is borrowed for one call. REQUIRES: units can be updated
// (FlatParameter::PrepareUpdate).
struct TrainingState {
  const ShardedModel& model;
  Optimization& optimization;
  OptimizerGroups& groups;
  const proto::Config& config;  // resolved
  RunPlace place;
  std::string manager_state;  // SaveOptions'

  Communicator* comm() const { return model.comm(); }
  ShardedOptimizer* optimizer() const { return optimization.optimizer(); }
  LossScaler* scaler() const { return optimization.scaler(); }
};

// Lists what a checkpoint is to hold: each element of masters and optimizer
// states once, from one of the ranks that hold it; buffers and parameters that
// the engine leaves alone, once if all ranks have the same, else rank 0's and
// those that differ; steps per parameter, options of groups that the program
// has set, the states of the scheduler (if it has one) and of the loss scaler;
// and for each rank the default generators of the CPU and of the model's
// device, and `client_state`. Nothing is copied: pieces marked as lasting are
// valid until the next update. COLLECTIVE.
absl::StatusOr<CheckpointContent> ContentOf(const TrainingState& state,
                                            absl::string_view client_state);

struct LoadedState {
  int64_t step = 0;
  int64_t skipped_steps = 0;
  // Absent in checkpoints of versions that did not count them.
  std::optional<int64_t> samples, batch;
  LoadCheckpointReport report;
};
// Loads the owned parts of what `options` (identical on all ranks) select,
// whatever world size and stage saved them; the caller publishes them. What
// ranks have of their own (generators, differing buffers, client_state) is
// restored where as many ranks load as saved; else generators stay, buffers are
// rank 0's, and rank r gets the client_state of rank r modulo the saved world
// size. Everything that can be wrong with the files is found, on every rank,
// before anything is changed. States on a disk, and those of 8 bits, are read
// twice, one flat at a time in memory; all other states take their size in
// memory once more. COLLECTIVE. `*changed`: whether something has changed
// although an error is returned.
absl::StatusOr<LoadedState> LoadState(const std::string& dir,
                                      const TrainingState& state,
                                      const LoadCheckpointOptions& options,
                                      bool* changed);

}  // namespace tessera
#endif  // ENGINE_CHECKPOINT_TRAINING_STATE_H_
