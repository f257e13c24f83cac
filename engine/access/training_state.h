// TrainingState: what a checkpoint of an engine holds, and in which order; the
// bytes go through checkpoint/checkpoint.h.
#ifndef ENGINE_ACCESS_TRAINING_STATE_H_
#define ENGINE_ACCESS_TRAINING_STATE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "comm/communicator.h"
#include "optim/adamw.h"
#include "optim/loss_scaler.h"
#include "sharding/flat/flat_parameter.h"

namespace tessera {

// Borrowed for one call. REQUIRES: units can be updated
// (FlatParameter::PrepareUpdate).
struct TrainingState {
  const std::vector<std::shared_ptr<FlatParameter>>& flats;
  AdamW* optimizer;    // may be null
  LossScaler* scaler;  // may be null
  Communicator* comm;  // all ranks
  // These and the next so many hold replicas of the same parts, and so on.
  int shard_group_size;
  int stage;
  int64_t step;
};

// Owned parts of masters and optimizer states, steps per parameter, the loss
// scaler's state, in the files of the first shard group; and this rank's
// default CPU generator and `client_state`. COLLECTIVE.
absl::Status SaveState(const std::string& dir, const TrainingState& state,
                       absl::string_view client_state);

struct LoadedState {
  int64_t step = 0;
  std::string client_state;
};
// Fills the owned parts; the caller publishes them. Everything that can be
// wrong with the files is found, on every rank, before anything is changed.
// COLLECTIVE.
absl::StatusOr<LoadedState> LoadState(const std::string& dir,
                                      const TrainingState& state);

}  // namespace tessera
#endif  // ENGINE_ACCESS_TRAINING_STATE_H_
