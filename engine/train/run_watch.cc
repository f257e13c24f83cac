#include "engine/train/run_watch.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/log.h"
#include "base/torch/deterministic.h"
#include "base/torch/grad_access.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "c10/core/Event.h"
#include "c10/core/ScalarType.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "config/config.pb.h"
#include "optim/gradients/non_finite.h"

namespace tessera {
namespace {

constexpr size_t kNamed = 5;

std::string Named(const std::vector<NonFiniteGradient>& gradients) {
  return gradients.empty() ? "all parameters are finite, but not their norm"
                           : absl::StrCat(DescribeNonFinite(gradients, kNamed),
                                          " are not finite");
}

// Not an element that keeps the memory of many.
at::Tensor OwnCopy(const at::Tensor& loss) {
  const at::Tensor own = loss.detach();
  return own.storage().nbytes() > own.nbytes() ? own.clone() : own;
}

}  // namespace

// The loss and its copy in memory that devices write to by themselves.
struct RunWatch::Look {
  explicit Look(const at::Tensor& loss)
      : on_host(at::empty(
            {},
            loss.options().requires_grad(false).device(at::kCPU).pinned_memory(
                true))),
        device(loss.device()),
        arrived(loss.device().type()) {}

  bool Fits(const at::Tensor& loss) const {
    return loss.device() == device &&
           loss.scalar_type() == on_host.scalar_type();
  }
  void Begin(const at::Tensor& loss, int64_t of) {
    on_host.copy_(loss.detach().reshape({}), /*non_blocking=*/true);
    arrived.record(
        c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    step = of;
    under_way = true;
    later = at::Tensor();
  }

  at::Tensor on_host;
  const at::Device device;
  c10::Event arrived;
  int64_t step = 0;
  bool under_way = false;
  // The newest loss, which came while a look was under way.
  at::Tensor later;
  int64_t later_step = 0;
};

RunWatch::RunWatch(const ShardedModel* model, const Optimization* optimization,
                   const LrSchedule* schedule, const proto::Config* config,
                   bool skips)
    : model_(*model),
      optimization_(*optimization),
      schedule_(schedule),
      config_(*config),
      skips_(skips) {}
RunWatch::~RunWatch() = default;

// What cannot be read any more (a loss that is a parameter itself, say) is not
// looked at.
void RunWatch::AddLoss(const at::Tensor& loss, int64_t step) {
  if (!std::exchange(backward_made_, true)) TellUnordered(loss);
  if (!at::isFloatingType(loss.scalar_type())) return;
  if (!told_narrow_) TellNarrow(loss);
  if (told_loss_) return;
  (void)CatchTorch("loss", [&] {
    TorchScope scope;
    if (loss.device().is_cpu()) return Tell(loss.item().toDouble(), step);
    TellLoss(/*wait=*/false);
    if (look_ != nullptr && look_->under_way) {
      look_->later = look_->Fits(loss) ? OwnCopy(loss) : at::Tensor();
      look_->later_step = step;
      return;
    }
    if (look_ == nullptr || !look_->Fits(loss)) {
      look_ = std::make_unique<Look>(loss);
    }
    look_->Begin(loss, step);
  });
}

void RunWatch::TellLoss(bool wait) {
  if (look_ == nullptr || !look_->under_way) return;
  (void)CatchTorch("loss", [&] {
    TorchScope scope;
    if (!look_->arrived.query()) {
      if (!wait) return;
      look_->arrived.synchronize();
    }
    look_->under_way = false;
    Tell(look_->on_host.item().toDouble(), look_->step);
    if (!wait || told_loss_ || !look_->later.defined()) return;
    look_->Begin(at::Tensor(look_->later), look_->later_step);
    TellLoss(wait);
  });
}

void RunWatch::Tell(double loss, int64_t step) {
  if (told_loss_ || std::isfinite(loss)) return;
  told_loss_ = true;
  TESSERA_LOG(WARNING)
      << "the loss of this rank in optimizer step " << step << " is " << loss
      << (skips_ ? "; a step with such gradients is skipped"
                 : "; nothing skips such a step, so the parameters become NaN, "
                   "too")
      << ": look for the first batch, or operator, whose values are not "
         "finite, "
         "lower the learning rate or clip gradients, and continue from a "
         "checkpoint before it (logged once)";
}

// It looks at the first graph alone: that takes a microsecond a node.
void RunWatch::TellUnordered(const at::Tensor& loss) {
  const std::string& wanted = config_.sharding().deterministic();
  if (loss.device().is_cpu() || wanted == "on" || wanted == "off") return;
  const auto operators =
      CatchTorch("graph", [&] { return UnorderedBackwards(loss); });
  if (!operators.ok() || operators->empty()) return;
  TESSERA_LOG_RANK0(WARNING)
      << "Backward: sharding.deterministic is \"auto\", and the backward of "
      << absl::StrJoin(*operators, ", ") << " adds up in any order on "
      << loss.device()
      << ", so runs, stages and numbers of ranks may differ in the last bits; "
         "\"on\" "
         "gives the same bits (with a slower attention), \"off\" is for "
         "programs "
         "that do not need this (logged once)";
}

void RunWatch::TellNarrow(const at::Tensor& loss) {
  const bool bf16 = loss.scalar_type() == at::kBFloat16;
  if (!bf16 && loss.scalar_type() != at::kHalf) return;
  told_narrow_ = true;
  TESSERA_LOG_RANK0(WARNING)
      << "Backward: the loss is " << (bf16 ? "bfloat16" : "float16")
      << ", which has " << (bf16 ? 8 : 11)
      << " significant bits (near 5 it moves in steps of 1/"
      << (bf16 ? 32 : 256)
      << "), so logs, a schedule that follows it, and its gradient are that "
         "coarse; compute it in float32: logits.to(at::kFloat) before the loss "
         "(logged once)";
}

bool RunWatch::names_next() const {
  const int64_t most = config_.precision().max_skipped_in_a_row();
  return (most > 0 && skipped_in_a_row_ + 1 >= most) ||
         (!told_skip_ && model_.device().is_cpu());
}

absl::Status RunWatch::AddOutcome(const StepReport& report, int64_t steps_done,
                                  double scale) {
  if (!report.skipped) {
    skipped_in_a_row_ = 0;
    return absl::OkStatus();
  }
  ++skipped_in_a_row_;
  const int64_t most = config_.precision().max_skipped_in_a_row();
  if (!told_skip_) {
    told_skip_ = true;
    const std::string named =
        report.non_finite.empty() && !model_.device().is_cpu()
            ? absl::StrCat("are not finite (",
                           optimization_.scaler() != nullptr ? "fp16" : "bf16",
                           ".name_overflows finds which)")
            : absl::StrCat("of ", Named(report.non_finite));
    TESSERA_LOG_RANK0(WARNING)
        << "optimizer step " << steps_done + 1
        << " was skipped, and is tried again with the next batch: gradients "
        << named
        << (optimization_.scaler() != nullptr &&
                    optimization_.scaler()->dynamic()
                ? absl::StrCat("; the loss scale was ", scale, " and is now ",
                               optimization_.scaler()->scale(),
                               " (it begins too high, so a few such steps at "
                               "the start are normal)")
                : "")
        << "; Engine::last_step() and the monitors count skipped steps"
        << (most > 0 ? absl::StrCat(", and ", most,
                                    " in a row end the run "
                                    "(precision.max_skipped_in_a_row)")
                     : "")
        << " (logged once)";
  }
  if (most == 0 || skipped_in_a_row_ < most) return absl::OkStatus();
  return absl::OutOfRangeError(absl::StrCat(
      "Step: ", skipped_in_a_row_,
      skipped_in_a_row_ == 1 ? " optimizer step" : " optimizer steps in a row",
      skipped_in_a_row_ == 1 ? " was" : " were",
      " skipped since gradients are not finite, and nothing is trained any "
      "more (after step ",
      steps_done,
      "): look for the first loss that is not finite, lower the learning rate "
      "or clip gradients, and continue from a checkpoint before it; "
      "precision.max_skipped_in_a_row is how many are allowed"));
}

// By then the rate has been as small as it was to be.
void RunWatch::AddRate(int64_t steps_done) {
  if (told_rate_ || schedule_ == nullptr) return;
  const auto last = schedule_->RisesAfter();
  if (!last.has_value() || steps_done <= *last) return;
  told_rate_ = true;
  TESSERA_LOG_RANK0(WARNING)
      << "the learning rate rises again from optimizer step " << *last + 2
      << " on, for " << config_.scheduler().params().t_max()
      << " steps: CosineAnnealingLR has been at its lowest after step " << *last
      << ", as in torch; make scheduler.params.T_max the number of steps of "
         "the "
         "whole run, or set scheduler.params.after to \"hold\" (logged once)";
}

bool RunWatch::HasGradients() const {
  for (const auto& flat : model_.flats()) {
    for (const auto& p : flat->parameters()) {
      if (PeekGrad(p.tensor).defined()) return true;
    }
  }
  return false;
}

// An engine that evaluates has no gradients, and one without an optimizer may
// have them made to be looked at.
void RunWatch::TellUnmanaged() const {
  const proto::Checkpoint& section = config_.checkpoint();
  const char* const key = section.every_steps() > 0     ? "every_steps"
                          : section.every_minutes() > 0 ? "every_minutes"
                          : section.minutes_between_failures() > 0
                              ? "minutes_between_failures"
                          : !section.folder().empty() ? "folder"
                                                      : nullptr;
  if (key == nullptr) return;
  TESSERA_LOG_RANK0(WARNING)
      << "checkpoint." << key
      << ": nothing is saved by this key, since a CheckpointManager reads it "
         "and the program has made none before its first Step "
         "(engine/checkpoint_manager.h)";
}

void RunWatch::End() {
  if (step_called_ || told_end_ || optimization_.gradients() == nullptr ||
      optimization_.optimizer() == nullptr) {
    return;
  }
  const bool outside =
      optimization_.gradients()->any_outside() || HasGradients();
  if (!outside && !backward_made_) return;
  told_end_ = true;
  TESSERA_LOG_RANK0(WARNING)
      << "this engine has never stepped, and trained nothing: "
      << (outside ? "gradients of its parameters were made by a bare "
                    "loss.backward(), which sums nothing over ranks, or by "
                    "another engine's Backward"
                  : "Engine::Backward was called, and Engine::Step never")
      << "; write engine->Backward(loss) in place of loss.backward(), and "
         "engine->Step() in place of clip_grad_norm_, optimizer.step() and "
         "zero_grad() (docs/migration.md); an evaluation needs no gradients: "
         "hold a torch::NoGradGuard";
}

}  // namespace tessera
