#include "sharding/copy/working_copy.h"

#include <utility>

#include "base/status.h"
#include "sharding/copy/replicated_copy.h"
#include "sharding/copy/sharded_copy.h"
#include "sharding/copy/shared_copy.h"

namespace tessera {

absl::StatusOr<std::unique_ptr<WorkingCopy>> WorkingCopy::Make(
    const FlatDescription* flat, std::atomic<int64_t>* live) {
  const FlatParameterOptions& options = flat->options();
  if (options.shared != nullptr) return SharedCopy::Make(flat);
  // A device that is alone has nothing to gather: its shard is the whole copy,
  // which a gather would only copy, unless it is on the host. On the CPU a
  // program of one rank is shown what it would be with more of them.
  const bool alone = flat->communicator()->world_size() == 1 &&
                     !flat->device().is_cpu() &&
                     options.parameters == Tier::kMemory;
  if (!options.stage.sharded_parameters || alone) {
    return ReplicatedCopy::Make(flat);
  }
  if (options.served != nullptr) return ServedCopy::Make(flat, live);
  return GatheredCopy::Make(flat, live);
}

void WorkingCopy::SetWhole(FlatBuffer whole) {
  whole_ = std::move(whole);
  is_whole_ = whole_.defined();
}

void WorkingCopy::Drop() { SetWhole({}); }

// After an error half of the owners' new values may be there. So what is always
// whole stays on its way for good: nobody sees a mixture of two steps.
absl::Status WorkingCopy::Settle() {
  if (!arriving()) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(arriving_->Wait());
  arriving_.reset();
  return absl::OkStatus();
}

absl::StatusOr<FlatBuffer> WorkingCopy::Allocate(int64_t numel, MemoryKind kind,
                                                 Fill fill) const {
  return FlatBuffer::Allocate(numel, flat_.dtype(), flat_.device(), kind, fill);
}

void WorkingCopy::TakeOwned(Range slot, const at::Tensor& values,
                            const at::Tensor& to) {
  const Range owned = flat_.owned();
  const Range mine = Intersect(slot, owned);
  if (mine.empty()) return;
  Slice(to, {mine.begin - owned.begin, mine.end - owned.begin})
      .copy_(values.narrow(0, mine.begin - slot.begin, mine.numel()));
}

}  // namespace tessera
