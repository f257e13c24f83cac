// StateMatch: maps the storages of a model that are to be loaded to those of a
// checkpoint.
#ifndef ENGINE_CHECKPOINT_STATE_MATCH_H_
#define ENGINE_CHECKPOINT_STATE_MATCH_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "checkpoint/format/manifest.pb.h"
#include "engine/api/engine_types.h"
#include "engine/checkpoint/state_table.h"
#include "sharding/flat/flat_parameter.h"

namespace tessera {

class StateMatch {
 public:
  struct Place {
    int storage = -1;   // of the manifest; -1: this one is left alone
    int64_t shift = 0;  // the element there that is the slot's first
    Place() { states.fill(-1); }
    // The numbers of its states in the manifest; -1: it has none.
    std::array<int, StateTable::kMostStates> states;
    bool loaded() const { return storage >= 0; }
    // Whether the checkpoint has some of its optimizer states.
    bool has_states() const;
  };

  // Matches names. InvalidArgument: options that match nothing in this model;
  // FailedPrecondition lists what the checkpoint lacks, has besides, or has in
  // other sizes, or a shaped state without another. Errors of these name the
  // parameter.
  static absl::StatusOr<StateMatch> Create(
      const StateTable& table,
      const std::vector<std::shared_ptr<FlatParameter>>& flats,
      const proto::CheckpointManifest& manifest,
      const LoadCheckpointOptions& options);

  const Place& slot(size_t i) const { return slots_[i]; }
  const Place& plain(size_t i) const { return plain_[i]; }
  // Returns the storage of a shaped state; -1: none has it, or it is left
  // alone. REQUIRES: !LoadCheckpointOptions::model_only.
  int shaped(size_t i) const { return shaped_[i]; }
  // Returns how many optimizer steps a tensor has done in the checkpoint;
  // nullopt: it is left alone.
  std::optional<int64_t> steps(const at::Tensor& tensor) const;
  // Names of what was to be loaded and the checkpoint lacks, and of what the
  // module lacks; empty where LoadCheckpointOptions::strict.
  const std::vector<std::string>& missing() const { return missing_; }
  const std::vector<std::string>& unexpected() const { return unexpected_; }
  // States that the saving run's optimizer did not have and that begin now, as
  // "NAME (STATE)"; empty where strict.
  const std::vector<std::string>& late() const { return late_; }
  // Describes how many are loaded, with a fingerprint of where from.
  std::string Describe() const;

 private:
  std::vector<Place> slots_, plain_;
  absl::flat_hash_map<const at::TensorImpl*, int64_t> steps_;
  std::vector<int> shaped_;
  std::vector<std::string> missing_, unexpected_, late_;
};

}  // namespace tessera
#endif  // ENGINE_CHECKPOINT_STATE_MATCH_H_
