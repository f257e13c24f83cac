// ShardedModel: a user's module as it lies on the ranks: the mesh of ranks that
// share it, its flat parameters, where in them a parameter is, and the order in
// which they are used.
//
// Threads: none; calls of an engine come from one thread at a time.
#ifndef ENGINE_MODEL_SHARDED_MODEL_H_
#define ENGINE_MODEL_SHARDED_MODEL_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "comm/communicator.h"
#include "comm/mesh/mesh.h"
#include "parallel/tensor/part_group.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/flat/schedule.h"

namespace torch::nn {
class Module;
}

namespace tessera {

// A parameter of the engine: the number of its flat, and its number in the
// flat.
struct ParameterRef {
  int flat, parameter;
};

class ShardedModel {
 public:
  ShardedModel(std::shared_ptr<torch::nn::Module> module,
               std::shared_ptr<Communicator> comm)
      : module_(std::move(module)), job_(std::move(comm)) {}

  // ---- Engine::Create's, in this order ----
  void SetStage(int stage) { stage_ = stage; }
  // Makes the mesh: each `tensor_ranks` neighbours have the parts of the layers
  // (kTp), each `sequence_ranks` of the others parts of sequences (kCp), those
  // that lie furthest apart the stages of a pipeline (kPp), and what is left has
  // samples of its own (kDp). COLLECTIVE, unless one of them is all ranks;
  // errors of Communicator::Split.
  absl::Status MakeMesh(int pipeline_ranks, int sequence_ranks,
                        int tensor_ranks);
  // Flats are sharded over neighbours of kDpCp, `shards` at a time, whose groups
  // (kDpShard) hold replicas of each other (kDpReplicate). Otherwise as
  // MakeMesh.
  absl::Status MakeShardGroups(int shards);
  void SetPartGroup(std::shared_ptr<PartGroup> group) {
    part_group_ = std::move(group);
  }
  void SetSchedule(std::shared_ptr<Schedule> schedule) {
    schedule_ = std::move(schedule);
  }
  void Add(std::shared_ptr<FlatParameter> flat);
  // Called by Close: drops the flats.
  void Clear() { flats_.clear(); }

  torch::nn::Module& module() const { return *module_; }
  // The job: all ranks of the engine. For agreements, and for which of them
  // prints, writes a file or has random numbers of its own.
  Communicator* comm() const { return job_.get(); }
  // The ranks that have the same parts of layers as this one, over which
  // gradients are summed up. REQUIRES: MakeMesh, as for mesh and the groups of
  // its axes.
  const std::shared_ptr<Communicator>& summing() const {
    return mesh_->group(kDpCp);
  }
  // Those of them that have samples of their own: for means over samples.
  Communicator* data() const { return mesh_->group(kDp).get(); }
  const Mesh& mesh() const { return *mesh_; }
  // The ranks that have the parts of the layers; of one rank: there are none.
  const std::shared_ptr<Communicator>& tensor() const {
    return mesh_->group(kTp);
  }
  bool has_cuts() const { return mesh_->size(kTp) > 1; }
  // The ranks that have the parts of sequences, likewise.
  const std::shared_ptr<Communicator>& sequence() const {
    return mesh_->group(kCp);
  }
  bool has_sequences() const { return mesh_->size(kCp) > 1; }
  // What tensors that are divided go through; null: none are.
  const std::shared_ptr<PartGroup>& part_group() const { return part_group_; }
  // The ranks that have the stages of a pipeline, likewise.
  const std::shared_ptr<Communicator>& pipeline() const {
    return mesh_->group(kPp);
  }
  bool has_stages() const { return mesh_->size(kPp) > 1; }
  // Whether parameters are not whole on each rank.
  bool has_parts() const { return has_cuts() || has_stages(); }
  // Whether ranks wait for each other within a forward, whatever the stage is.
  bool forwards_together() const { return has_parts() || has_sequences(); }
  // The ranks that a flat is sharded over, and those that own the same part of
  // it as this one; null: no other rank does.
  const std::shared_ptr<Communicator>& shard() const {
    return mesh_->group(kDpShard);
  }
  const std::shared_ptr<Communicator>& replicas() const {
    return mesh_->group(kDpReplicate);
  }
  int stage() const { return stage_; }
  const std::shared_ptr<Schedule>& schedule() const { return schedule_; }
  const std::vector<std::shared_ptr<FlatParameter>>& flats() const {
    return flats_;
  }
  // The flats' device; the CPU without flats.
  at::Device device() const;

  // Find a parameter by its first name, and a flat by its name. NotFound.
  // LOCAL.
  absl::StatusOr<ParameterRef> Find(absl::string_view name) const;
  absl::StatusOr<FlatParameter*> FindFlat(absl::string_view name) const;
  FlatParameter& flat(const ParameterRef& place) const {
    return *flats_[static_cast<size_t>(place.flat)];
  }

 private:
  const std::shared_ptr<torch::nn::Module> module_;
  const std::shared_ptr<Communicator> job_;
  std::shared_ptr<Mesh> mesh_;
  std::shared_ptr<PartGroup> part_group_;
  int stage_ = 0;
  std::shared_ptr<Schedule> schedule_;
  std::vector<std::shared_ptr<FlatParameter>> flats_;
  absl::flat_hash_map<std::string, ParameterRef> places_;
};

}  // namespace tessera
#endif  // ENGINE_MODEL_SHARDED_MODEL_H_
