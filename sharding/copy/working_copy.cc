#include "sharding/copy/working_copy.h"

#include <utility>

#include "base/memory/memory.h"
#include "base/status.h"
#include "sharding/copy/lone_copy.h"
#include "sharding/copy/replicated_copy.h"
#include "sharding/copy/sharded_copy.h"
#include "sharding/copy/shared_copy.h"

namespace tessera {

absl::StatusOr<std::unique_ptr<WorkingCopy>> WorkingCopy::Make(
    const FlatDescription* flat, ShardStates* states,
    std::atomic<int64_t>* live) {
  const FlatParameterOptions& options = flat->options();
  if (options.shared != nullptr) return SharedCopy::Make(flat, states);
  // A rank that is alone has nothing to gather: its shard is the whole copy,
  // which a gather would only copy, unless it is elsewhere. On the CPU a
  // program of one rank is shown all the same what it would be with more of
  // them; with freed memory poisoned there must be some that is freed.
  const bool alone = flat->communicator()->world_size() == 1 &&
                     options.parameters_tier == Tier::kMemory &&
                     !options.shard_alone;
  const bool on_cpu = flat->device().is_cpu();
  if (!options.stage.sharded_parameters || (alone && !on_cpu)) {
    return ReplicatedCopy::Make(flat, states);
  }
  TESSERA_RETURN_IF_ERROR(
      states->Add(ShardStates::kWorking, flat->dtype(),
                  options.PlaceOf(options.parameters_tier)));
  if (alone && !PoisonsOnFree()) {
    return std::make_unique<LoneCopy>(flat, states, live);
  }
  if (options.served != nullptr) {
    return std::make_unique<ServedCopy>(flat, states, live);
  }
  return std::make_unique<GatheredCopy>(flat, states, live);
}

void WorkingCopy::SetWhole(FlatBuffer whole) {
  whole_ = std::move(whole);
  is_whole_ = whole_.defined();
}

void WorkingCopy::Drop() {
  states_.Drop(ShardStates::kWorking);
  saved_.Reset();
  SetWhole({});
}

// After an error half of the owners' new values may be there. So what is always
// whole stays on its way for good: nobody sees a mixture of two steps.
absl::Status WorkingCopy::AwaitArrival() {
  if (!arriving()) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(arriving_->Wait());
  arriving_.reset();
  return absl::OkStatus();
}

absl::Status WorkingCopy::SaveWhole() {
  TESSERA_ASSIGN_OR_RETURN(
      saved_, Allocate(whole().numel(), MemoryKind::kWorking, Fill::kNone));
  CopyBytes(flat_.device(), saved_.data(), whole().data(), saved_.bytes());
  return absl::OkStatus();
}

void WorkingCopy::RestoreWhole() {
  if (!saved_.defined()) return;
  CopyBytes(flat_.device(), whole().data(), saved_.data(), saved_.bytes());
  saved_.Reset();
}

absl::StatusOr<FlatBuffer> WorkingCopy::Allocate(int64_t numel, MemoryKind kind,
                                                 Fill fill) const {
  return FlatBuffer::Allocate(numel, flat_.dtype(), flat_.device(), kind, fill);
}

void WorkingCopy::Take(Range slot, const at::Tensor& values) {
  const Range owned = flat_.owned();
  const Range mine = Intersect(slot, owned);
  if (mine.empty()) return;
  shard()
      .View({mine.begin - owned.begin, mine.end - owned.begin})
      .copy_(values.narrow(0, mine.begin - slot.begin, mine.numel()));
}

}  // namespace tessera
