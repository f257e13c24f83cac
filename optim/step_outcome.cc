#include "optim/step_outcome.h"

#include <utility>

#include "ATen/ops/empty.h"
#include "base/stream/stream_uses.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "c10/core/Event.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "optim/norm/grad_norm.h"

namespace tessera {

// Why the copy comes before the update: the norm is known long before AdamW has
// gone through the states, and an outcome that is asked for then waits for
// less.
struct StepOutcome::Pending {
  Pending(const at::Tensor& scalars, const NormFinish& finish, int64_t ranks)
      : scalars(scalars),
        uses(scalars.device()),
        arrived(scalars.device().type()),
        skips(finish.skip_on_overflow),
        group_size(finish.group_size),
        has_replicas(ranks > finish.group_size) {
    TorchScope scope;
    uses.SetReady();
    on_host = at::empty(scalars.sizes(),
                        scalars.options().device(at::kCPU).pinned_memory(true));
    on_host.copy_(scalars, /*non_blocking=*/true);
    arrived.record(c10::impl::VirtualGuardImpl(scalars.device().type())
                       .getStream(scalars.device()));
  }
  // Other streams may not have come to Skipped yet.
  ~Pending() { uses.Keep(scalars); }

  const at::Tensor scalars;
  StreamUses uses;
  c10::Event arrived;  // in on_host
  at::Tensor on_host;
  const bool skips;
  const int64_t group_size;
  const bool has_replicas;
};

StepOutcome::StepOutcome(const ShardedStepResult& result) : result_(result) {}
StepOutcome::StepOutcome(const at::Tensor& scalars, const NormFinish& finish,
                         int64_t ranks)
    : pending_(std::make_unique<Pending>(scalars, finish, ranks)) {}
StepOutcome::~StepOutcome() = default;
StepOutcome::StepOutcome(StepOutcome&&) noexcept = default;
StepOutcome& StepOutcome::operator=(StepOutcome&&) noexcept = default;

bool StepOutcome::may_be_skipped() const {
  return pending() && pending_->skips;
}

bool StepOutcome::only_reports() const {
  return !may_be_skipped() && !(pending() && pending_->has_replicas);
}

at::Tensor StepOutcome::Skipped() {
  TorchScope scope;
  pending_->uses.Use();
  return pending_->scalars.select(0, kSkip).ne(0);
}

absl::StatusOr<ShardedStepResult> StepOutcome::Take() {
  if (pending_ == nullptr) return result_;
  const std::unique_ptr<Pending> pending = std::move(pending_);
  return CatchTorch("Step", [&]() -> absl::StatusOr<ShardedStepResult> {
    if (!pending->arrived.query()) pending->arrived.synchronize();
    const double* const scalars = pending->on_host.const_data_ptr<double>();
    if (scalars[kReplicasDiffer] != 0) {
      return ReplicasDiffer(static_cast<int64_t>(scalars[kReplicasDiffer]) - 1,
                            pending->group_size);
    }
    result_.skipped = scalars[kSkip] != 0;
    result_.grad_norm = scalars[kGradNorm];
    result_.clipped_norm = scalars[kClippedNorm];
    return result_;
  });
}

}  // namespace tessera
