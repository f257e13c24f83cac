// Backward and Step.
#include <cmath>
#include <utility>

#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/memory/heap.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/comm_thread.h"
#include "engine/engine_impl.h"
#include "engine/setup/initial_sync.h"
#include "optim/lr_schedule.h"
#include "optim/sharded_step.h"
#include "sharding/dispatch/saved_tensors.h"
#include "sharding/gradient/nested_graphs.h"
#include "sharding/layout/module_walk.h"
#include "sharding/torch/torch_scope.h"
#include "torch/csrc/autograd/variable.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

absl::Status CheckLoss(const at::Tensor& loss) {
  if (!loss.defined()) {
    return absl::InvalidArgumentError("Backward: the loss is undefined");
  }
  if (loss.numel() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("Backward: expected a loss of one element, got ",
                     loss.numel(), "; take its mean or sum"));
  }
  if (!loss.requires_grad()) {
    return absl::InvalidArgumentError(
        "Backward: the loss does not require a gradient (was the forward run "
        "under NoGradGuard, or are all parameters frozen?)");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Engine::Impl::CheckBackward(const at::Tensor& loss,
                                         const BackwardOptions& options) {
  TESSERA_RETURN_IF_ERROR(CheckLoss(loss));
  if (options.weight.has_value() &&
      !(std::isfinite(*options.weight) && *options.weight >= 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("Backward: expected a finite weight of at least 0, got ",
                     *options.weight));
  }
  if (weighted_.has_value() && *weighted_ != options.weight.has_value()) {
    return absl::FailedPreconditionError(
        "Backward: some micro-batches of this step have a weight and some have "
        "none");
  }
  if (settings_.autocast_dtype.has_value() && !autocast_seen_) {
    return absl::FailedPreconditionError(
        "Backward: the configuration enables torch_autocast, but forward did "
        "not run within an Engine::AutocastScope");
  }
  return absl::OkStatus();
}

bool Engine::Impl::ReducesNow() const {
  const bool last = micro_steps_ + 1 >= config_.gradient_accumulation_steps();
  return no_sync_ == 0 && (last || !settings_.accumulate_locally);
}

// What autograd starts from, in the loss's dtype: undefined for 1. One that a
// half loss cannot hold is infinite there, and the step an overflow. A weight
// counts as what it is in that dtype.
at::Tensor Engine::Impl::Seed(const at::Tensor& loss,
                              std::optional<double> weight,
                              MicroBatch* micro_batch) const {
  TorchScope scope;
  const double scale = scaler_.has_value() ? scaler_->scale() : 1;
  const double share = weight.value_or(
      1.0 / static_cast<double>(config_.gradient_accumulation_steps()));
  if (scale * share == 1) return at::Tensor();
  const at::Tensor seed =
      at::full(loss.sizes(), scale * share,
               at::TensorOptions(at::kDouble).device(loss.device()))
          .to(loss.scalar_type());
  const double used = seed.item().toDouble() / scale;
  if (weight.has_value() && std::isfinite(used)) micro_batch->weight = used;
  return seed;
}

// To ask a tensor for its graph may throw: the backward will say why.
bool Engine::Impl::MayNest(const at::Tensor& loss) const {
  if (!gradients_->AnyUsedWithoutGrad() || !loss.defined()) return false;
  return CatchTorch("graph", [&] { return GraphMayNest(loss); }).value_or(true);
}

absl::Status Engine::Impl::Backward(const at::Tensor& loss,
                                    const BackwardOptions& options) {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  MicroBatch micro_batch;
  auto backward = [&] {
    ThrowIfError(CheckNotSummoned());
    ThrowIfError(CheckBackward(loss, options));
    loss.backward(Seed(loss, options.weight, &micro_batch));
    ThrowIfError(gradients_->CheckAttached());
  };
  micro_batch.position =
      absl::StrCat("optimizer step ", step_, ", micro-batch ", micro_steps_,
                   ", Backward ", gradients_->num_reductions(), " of the step");
  micro_batch.weight = options.weight;
  micro_batch.reduce = ReducesNow();
  micro_batch.may_nest = MayNest(loss);
  // The first backwards have large gradients on the heap, too.
  const bool keeps_heap = settings_.keep_freed_heap && device().is_cpu();
  if (keeps_heap) ReturnFreedHeap();
  absl::Status status = gradients_->Run(backward, micro_batch);
  ++backwards_;
  schedule_->EndPass();
  if (keeps_heap && backwards_ >= Gradients::kToLearnPlaces) KeepFreedHeap();
  if (status.ok()) {
    has_backward_ = true;
    weighted_ = options.weight.has_value();
  }
  return status;
}

absl::StatusOr<bool> Engine::Impl::AnyRankHasData(bool this_rank) {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  TESSERA_ASSIGN_OR_RETURN(
      const auto all,
      comm_->AllGatherStrings(this_rank ? "1" : "0", CommTag{"data left"}));
  for (const std::string& theirs : all) {
    if (theirs == "1") return true;
  }
  return false;
}

// A parameter registered since would be trained by nobody.
absl::Status Engine::Impl::CheckParametersKnown() const {
  if (FingerprintOfParameters(*module_) == parameters_fingerprint_)
    return absl::OkStatus();
  for (const auto& p : module_->named_parameters()) {
    if (known_parameters_.contains(p.value().unsafeGetTensorImpl())) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "parameter '", p.key(),
        "' was registered after Engine::Create, which does not see it; Close() "
        "the engine and Create another"));
  }
  return absl::FailedPreconditionError(
      "some of the module's parameters were unregistered after Engine::Create; "
      "Close() the engine and Create another");
}

// Where ranks read the working copy or the shards of others whenever they like:
// from now on none does, until EndUpdate. `mine`: what is wrong here, besides
// units that are held (`unit`: this one alone counts). Nothing has changed
// then. COLLECTIVE.
absl::Status Engine::Impl::EnterUpdate(absl::Status mine,
                                       absl::string_view where,
                                       FlatParameter* flat) {
  if (!shares_working_copy_ && served_ == nullptr) return absl::OkStatus();
  ReleaseNodePins();
  schedule_->EndPass();  // waits for what is on its way
  for (const auto& each : flats_) {
    if (flat != nullptr && each.get() != flat) continue;
    mine.Update(each->CheckUpdatable());
  }
  return comm_->AgreeOk(mine, where);
}

// All of what comes before an update; then all ranks have done it.
absl::Status Engine::Impl::AgreeOnUpdate(absl::Status mine,
                                         absl::string_view where) {
  mine.Update(CheckNotSummoned());
  TESSERA_RETURN_IF_ERROR(EnterUpdate(mine, where));
  if (mine.ok()) mine = MakeUpdatable();
  return comm_->AgreeOk(mine, where);
}

absl::Status Engine::Impl::MakeUpdatable() {
  ReleaseNodePins();
  schedule_->EndPass();
  return CatchTorch("update", [&]() -> absl::Status {
    for (const auto& flat : flats_) {
      TESSERA_RETURN_IF_ERROR(flat->PrepareUpdate());
    }
    return absl::OkStatus();
  });
}

// From the next use on a unit is what all owners have made of it. COLLECTIVE,
// ASYNC with overlap, with a shared working copy; else LOCAL.
absl::Status Engine::Impl::EndUpdate() {
  if (served_ != nullptr) served_->EndUpdate();
  if (!shares_working_copy_) return absl::OkStatus();
  return AwaitOthers(
      comm_->AllReduceSum(at::zeros({1}), CommTag{"end of an update"}));
}

absl::Status Engine::Impl::AwaitOthers(const CommFuture& written) {
  absl::Status status;
  for (const auto& flat : flats_) status.Update(flat->AwaitOthers(written));
  return status;
}

// This rank could not do its part of an update: what the others made of theirs
// is used by nobody.
absl::Status Engine::Impl::FailUpdate(const absl::Status& status) {
  comm_->Announce(status);
  if (served_ != nullptr) served_->FailUpdate(status);
  (void)AwaitOthers(DoneFuture(status));
  return status;
}

// Owners' new values reach the others, and libtorch learns of the change: a
// graph that saved the old values fails in backward, as in plain libtorch.
absl::Status Engine::Impl::Publish(size_t u, bool only_with_gradient,
                                   bool working_written) {
  const FlatGradient& gradient = gradients_->of(u);
  TESSERA_RETURN_IF_ERROR(flats_[u]->PublishOwned(working_written));
  const auto& params = flats_[u]->parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    if (!only_with_gradient || gradient.has_gradient(i)) {
      torch::autograd::impl::bump_version(params[i].tensor);
    }
  }
  return absl::OkStatus();
}

absl::Status Engine::Impl::CheckStep() {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  TESSERA_RETURN_IF_ERROR(CheckNotSummoned());
  if (optimizer_ == nullptr) {
    return absl::FailedPreconditionError(
        "Step: the configuration has no optimizer");
  }
  if (!has_backward_) {
    return absl::FailedPreconditionError(
        "Step: no Engine::Backward since the last Step (a bare "
        "loss.backward() leaves gradients that are not reduced)");
  }
  return absl::OkStatus();
}

double Engine::Impl::divisor() const {
  const double scale = scaler_.has_value() ? scaler_->scale() : 1;
  return weighted_.value_or(false) ? scale * gradients_->total_weight() : scale;
}

// With sharding.check_writes. COLLECTIVE.
absl::Status Engine::Impl::CheckWrites() {
  if (!settings_.check_writes) return absl::OkStatus();
  std::vector<uint64_t> written;
  for (const auto& flat : flats_) written.push_back(flat->TakeWritten());
  TESSERA_ASSIGN_OR_RETURN(
      const auto all,
      comm_->AllGatherStrings(
          absl::string_view(reinterpret_cast<const char*>(written.data()),
                            written.size() * sizeof(uint64_t)),
          CommTag{"comparison of what was written"}));
  for (size_t rank = 1; rank < all.size(); ++rank) {
    for (size_t u = 0; u < flats_.size(); ++u) {
      const size_t at = u * sizeof(uint64_t);
      if (all[rank].compare(at, sizeof(uint64_t), all[0], at,
                            sizeof(uint64_t)) == 0) {
        continue;
      }
      return absl::FailedPreconditionError(absl::StrCat(
          "[", flats_[u]->name(),
          "] what was written into parameters of the "
          "unit (the first is '",
          flats_[u]->parameters()[0].name,
          "') since the last Step differs between rank 0 and rank ", rank,
          "; make the same writes on all ranks"));
    }
  }
  return absl::OkStatus();
}

// The same on all ranks.
absl::Status Engine::Impl::CheckUpdate() {
  TESSERA_RETURN_IF_ERROR(CheckWrites());
  TESSERA_RETURN_IF_ERROR(CheckReplicas());
  if (!weighted_.value_or(false) || gradients_->total_weight() != 0) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      "Step: no rank had data (every weight of the step is 0); ask "
      "Engine::AnyRankHasData before a forward, and call ZeroGrad to go on");
}

void Engine::Impl::SetScheduledRate() {
  if (optimizer_ == nullptr) return;
  if (settings_.lr_schedule.has_value()) {
    const LrSchedule schedule(*settings_.lr_schedule);
    optimizer_->SetRate(schedule.Rate(step_));
    const auto betas = schedule.BetasAt(step_);
    if (betas.has_value()) optimizer_->SetBetas(betas->beta1, betas->beta2);
  }
  report_.learning_rate = optimizer_->rate();
}

absl::Status Engine::Impl::SetLearningRate(double rate) {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  absl::Status mine;
  if (optimizer_ == nullptr || settings_.lr_schedule.has_value()) {
    mine = absl::FailedPreconditionError(absl::StrCat(
        "the configuration has ",
        optimizer_ == nullptr ? "no optimizer"
                              : "a scheduler, which sets the rate itself"));
  } else if (!std::isfinite(rate) || rate < 0) {
    mine = absl::InvalidArgumentError(
        absl::StrCat("expected a finite number of at least 0, got ", rate));
  }
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(mine, "SetLearningRate"));
  TESSERA_RETURN_IF_ERROR(CheckSame(absl::StrFormat("%.17g", rate),
                                    "rate of SetLearningRate", comm_.get()));
  optimizer_->SetRate(rate);
  return absl::OkStatus();
}

absl::Status Engine::Impl::UpdateParameters() {
  SetScheduledRate();
  TESSERA_ASSIGN_OR_RETURN(
      const ShardedStepResult stepped,
      StepShards(
          flats_, *gradients_, divisor(), settings_.step, optimizer_.get(),
          [this](size_t u, bool working_written) {
            return Publish(u, /*only_with_gradient=*/true, working_written);
          },
          comm_.get()));
  report_.skipped = stepped.skipped;
  report_.grad_norm = stepped.grad_norm;
  report_.clipped_norm = stepped.clipped_norm;
  report_.loss_scale = scaler_.has_value() ? scaler_->scale() : 1;
  ++(stepped.skipped ? report_.skipped_steps : step_);
  return absl::OkStatus();
}

absl::Status Engine::Impl::OptimizerStep() {
  absl::Status status = gradients_->CheckNothingPending();
  if (status.ok()) status = CheckParametersKnown();
  const absl::Status entered = EnterUpdate(status, "Step");
  if (!entered.ok()) return status.ok() ? entered : status;
  if (status.ok()) status = MakeUpdatable();
  if (!status.ok()) return FailUpdate(status);  // the others may wait for us
  status = CheckUpdate();
  if (status.ok()) {
    status = UpdateParameters();
    if (!status.ok()) return FailUpdate(status);
  }
  const absl::Status ended = EndUpdate();
  if (!status.ok() || !ended.ok()) return status.ok() ? ended : status;
  EndStep();
  // The step is made, and the same on all ranks, whatever becomes of these.
  if (scaler_.has_value()) status = scaler_->Update(report_.skipped);
  if (buffer_sync_ != nullptr) status.Update(buffer_sync_->Sync());
  return status;
}

void Engine::Impl::EndStep() {
  gradients_->Zero();
  has_backward_ = autocast_seen_ = false;
  weighted_.reset();
  micro_steps_ = 0;
  EndKeptPeriod();
}

absl::Status Engine::Impl::Step() {
  TESSERA_RETURN_IF_ERROR(CheckStep());
  if (micro_steps_ + 1 < config_.gradient_accumulation_steps()) {
    ++micro_steps_;
    has_backward_ = autocast_seen_ = false;
    return absl::OkStatus();
  }
  if (no_sync_ > 0) {
    return absl::FailedPreconditionError(
        "Step: within an Engine::NoSyncScope the gradients are not reduced; "
        "end it before the last Backward of the step");
  }
  return CatchTorch("Step", [&] { return OptimizerStep(); });
}

absl::Status Engine::Impl::ZeroGrad() {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  ReleaseNodePins();
  EndStep();
  return absl::OkStatus();
}

}  // namespace tessera
