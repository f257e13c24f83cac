// UpdateGuard: what an ExclusiveScope (engine/model/exclusive_scope.h) keeps
// apart: an engine's model, whose owners change their parts in an update, and
// everything else that reads or writes these parts: other ranks, updates on the
// host or a disk, a save that is being written.
//
// Threads: none; calls of an engine come from one thread at a time.
#ifndef ENGINE_MODEL_UPDATE_GUARD_H_
#define ENGINE_MODEL_UPDATE_GUARD_H_

#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "engine/model/engine_life.h"
#include "engine/model/sharded_model.h"
#include "offload/update_stream.h"
#include "sharding/copy/served_gathers.h"

namespace tessera {

class UpdateGuard {
 public:
  // `model` and `life` outlive this. `before_change`: called before masters or
  // states change; null: nobody reads them.
  UpdateGuard(const ShardedModel* model, EngineLife* life,
              std::function<void()> before_change = nullptr)
      : model_(model), life_(life), before_change_(std::move(before_change)) {}

  // ---- How ranks get values, as Engine::Create chooses.

  // The ranks of a host have one working copy.
  void SetOneCopy() { one_copy_ = true; }
  // Ranks read each other's shards; without this, gathers are collectives.
  void SetServed(std::shared_ptr<ServedGathers> served) {
    served_ = std::move(served);
  }
  // Some states are updated by a stream; without this, all are in memory.
  void SetStream(std::shared_ptr<UpdateStream> stream) {
    stream_ = std::move(stream);
  }
  void DropStream() { stream_.reset(); }

  const ShardedModel& model() const { return *model_; }
  Communicator* comm() const { return model_->comm(); }
  EngineLife& life() const { return *life_; }
  bool one_copy() const { return one_copy_; }
  const std::shared_ptr<ServedGathers>& served() const { return served_; }
  const std::shared_ptr<UpdateStream>& stream() const { return stream_; }

  void BeforeChange() const {
    if (before_change_) before_change_();
  }
  // Engine::Offload has moved states.
  void NoteMoved() { moved_ = true; }
  // Reports that a call that changes masters or states could not finish:
  // offloaded states are then neither old nor new, and training with them is
  // refused. LOCAL.
  void FailTiers(const absl::Status& status) {
    if (stream_ != nullptr) {
      stream_->Fail(status);
    } else if (moved_) {
      life_->Lose(status);
    }
  }

 private:
  const ShardedModel* const model_;
  EngineLife* const life_;
  const std::function<void()> before_change_;
  bool one_copy_ = false;
  std::shared_ptr<ServedGathers> served_;
  std::shared_ptr<UpdateStream> stream_;
  bool moved_ = false;
};

}  // namespace tessera
#endif  // ENGINE_MODEL_UPDATE_GUARD_H_
