// ShardedModel: a user's module as it lies on the ranks: which groups of ranks
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

struct RankGroups {
  std::shared_ptr<Communicator> all;
  // `shard`: the ranks that the flats are sharded over, all or consecutive
  // ones; `replicas`: the ranks that hold the same part as this one, null if
  // none does.
  std::shared_ptr<Communicator> shard, replicas;
};

class ShardedModel {
 public:
  ShardedModel(std::shared_ptr<torch::nn::Module> module,
               std::shared_ptr<Communicator> comm)
      : module_(std::move(module)), ranks_{std::move(comm), nullptr, nullptr} {}

  // ---- Engine::Create's, in this order ----
  void SetStage(int stage) { stage_ = stage; }
  void SetGroups(std::shared_ptr<Communicator> shard,
                 std::shared_ptr<Communicator> replicas) {
    ranks_.shard = std::move(shard);
    ranks_.replicas = std::move(replicas);
  }
  void SetSchedule(std::shared_ptr<Schedule> schedule) {
    schedule_ = std::move(schedule);
  }
  void Add(std::shared_ptr<FlatParameter> flat);
  // Called by Close: drops the flats.
  void Clear() { flats_.clear(); }

  torch::nn::Module& module() const { return *module_; }
  const RankGroups& ranks() const { return ranks_; }
  Communicator* comm() const { return ranks_.all.get(); }
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
  RankGroups ranks_;
  int stage_ = 0;
  std::shared_ptr<Schedule> schedule_;
  std::vector<std::shared_ptr<FlatParameter>> flats_;
  absl::flat_hash_map<std::string, ParameterRef> places_;
};

}  // namespace tessera
#endif  // ENGINE_MODEL_SHARDED_MODEL_H_
