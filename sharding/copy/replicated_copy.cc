#include "sharding/copy/replicated_copy.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace tessera {

absl::StatusOr<std::unique_ptr<WorkingCopy>> ReplicatedCopy::Make(
    const FlatDescription* flat, ShardStates* states) {
  Traits traits;
  traits.publishes =
      flat->stage().sharded_optimizer && flat->communicator()->world_size() > 1;
  traits.resident_numel = flat->layout().whole_numel();
  auto copy =
      std::unique_ptr<ReplicatedCopy>(new ReplicatedCopy(flat, states, traits));
  TESSERA_ASSIGN_OR_RETURN(
      FlatBuffer whole, copy->Allocate(traits.resident_numel,
                                       MemoryKind::kParameters, Fill::kZero));
  states->SetWorking(whole.Part(flat->owned()));
  copy->SetWhole(std::move(whole));
  return copy;
}

void ReplicatedCopy::Take(Range slot, const at::Tensor& values) {
  whole().View(slot).copy_(values);
}

void ReplicatedCopy::Publish(CommFuture updated) {
  if (!traits_.publishes) {
    if (updated.valid()) arriving_ = std::move(updated);
    return;
  }
  CommTag tag =
      CommTag{absl::StrCat("all-gather after the step of unit ", flat_.name())}
          .For(WaitReason::kPublish);
  if (updated.valid()) {
    tag.ready = [updated = std::move(updated)] { return updated.Wait(); };
  }
  arriving_ = flat_.communicator()->AllGather(whole().Bytes(flat_.owned()),
                                              whole().Bytes(), std::move(tag));
}

}  // namespace tessera
