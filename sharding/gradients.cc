#include "sharding/gradients.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "sharding/saved_tensors.h"
#include "sharding/tensor_memory.h"
#include "sharding/torch_scope.h"
#include "torch/csrc/autograd/function_hook.h"
#include "torch/csrc/autograd/graph_task.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

namespace autograd = torch::autograd;

// How long a rank that failed waits for the others to say that they did too.
constexpr absl::Duration kAllFailedWait = absl::Seconds(4);
constexpr char kReduction[] = "reduction of gradients";

}  // namespace

class Gradients::ArrivalHook : public autograd::PostAccumulateGradHook {
 public:
  ArrivalHook(Gradients* owner, int unit, int parameter,
              std::unique_ptr<autograd::PostAccumulateGradHook> previous)
      : owner_(owner),
        unit_(unit),
        parameter_(parameter),
        previous_(std::move(previous)) {}

  void operator()(const at::Tensor& tensor) override {
    if (previous_ != nullptr) (*previous_)(tensor);
    owner_->Arrived(unit_, parameter_, tensor);
  }
  std::unique_ptr<autograd::PostAccumulateGradHook> TakePrevious() {
    return std::move(previous_);
  }
  // The hook of `owner` on `tensor`, or null.
  static ArrivalHook* On(const at::Tensor& tensor, const Gradients* owner) {
    auto* hook = dynamic_cast<ArrivalHook*>(
        autograd::impl::post_acc_grad_hooks(tensor).get());
    return hook != nullptr && hook->owner_ == owner ? hook : nullptr;
  }

 private:
  Gradients* owner_;
  int unit_, parameter_;
  std::unique_ptr<autograd::PostAccumulateGradHook> previous_;
};

Gradients::Gradients(const std::vector<std::shared_ptr<Unit>>& units,
                     std::shared_ptr<Communicator> comm,
                     GradientOptions options, std::vector<bool> expected)
    : comm_(std::move(comm)), options_(options) {
  auto next = expected.begin();
  for (size_t u = 0; u < units.size(); ++u) {
    const auto& params = units[u]->parameters();
    const auto end = next + static_cast<int64_t>(params.size());
    units_.push_back(std::make_unique<UnitGradient>(
        units[u], std::vector<bool>(next, end), options.in_place_bytes));
    next = end;
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& tensor = params[i].tensor;
      autograd::impl::set_post_acc_grad_hooks(
          tensor, std::make_unique<ArrivalHook>(
                      this, static_cast<int>(u), static_cast<int>(i),
                      std::move(autograd::impl::post_acc_grad_hooks(tensor))));
    }
  }
  MakeBuckets();
  places_ = std::make_unique<GradientPlaces>(
      units_, &mutex_,
      [this](const UnitGradient& unit) { return HowInPlace(unit); });
}

void Gradients::MakeBuckets() {
  int64_t numel = 0;
  const Unit* last = nullptr;
  for (auto it = units_.rbegin(); it != units_.rend(); ++it) {
    const Unit& unit = (*it)->unit();
    const int64_t more = unit.layout().whole_numel();
    const Stage stage = unit.stage();
    // Alone there is no cost to share.
    const bool fits =
        comm_->world_size() > 1 && last != nullptr &&
        numel + more <= options_.bucket_numel &&
        unit.reduce_dtype() == last->reduce_dtype() &&
        unit.device() == last->device() &&
        stage.sharded_gradients == last->stage().sharded_gradients;
    if (!fits) {
      buckets_.emplace_back();
      numel = 0;
    }
    buckets_.back().push_back(it->get());
    numel += more;
    last = &unit;
  }
}

Gradients::~Gradients() {
  for (const auto& unit : units_) {
    for (const auto& p : unit->unit().parameters()) {
      if (auto* hook = ArrivalHook::On(p.tensor, this)) {
        autograd::impl::set_post_acc_grad_hooks(p.tensor, hook->TakePrevious());
      }
    }
  }
  (void)FinishInFlight();  // a collective may still write into our buffers
}

UnitGradient::Arrival Gradients::HowNow() const {
  using How = UnitGradient::Arrival;
  if (running_ == nullptr) return How::kAdd;
  if (running_->weight.value_or(1.0) == 0.0) return How::kZero;
  return running_->reduce ? How::kAdd : How::kGather;
}

// Not where the forecast is wrong and others are at work: the memory of more
// units than these is not to be held.
std::optional<UnitGradient::Arrival> Gradients::HowInPlace(
    const UnitGradient& unit) const {
  bool at_work = !running_->reduce || unit.HasLocal();
  for (size_t i = cursor_; i < std::min(cursor_ + 2, buckets_.size()); ++i) {
    const auto& bucket = buckets_[i];
    at_work |= std::find(bucket.begin(), bucket.end(), &unit) != bucket.end();
  }
  if (!at_work) return std::nullopt;
  return HowNow();
}

void Gradients::Arrived(int unit_index, int parameter,
                        const at::Tensor& tensor) {
  TorchScope scope;
  absl::MutexLock lock(&mutex_);
  UnitGradient& unit = *units_[static_cast<size_t>(unit_index)];
  at::Tensor gradient = std::move(tensor.mutable_grad());
  if (!gradient.defined()) return;
  if (gradient.layout() != at::kStrided && !gradient.is_sparse()) {
    gradient = gradient.to_dense();
  }
  const bool ours = running_ != nullptr;
  if (ours && autograd::get_current_graph_task_id() != OutermostTask::id()) {
    unit.SetLate();
  }
  const bool part = !ours || unit.late();
  if (ours) places_->Arrived(unit_index, parameter, gradient);
  ThrowIfError(unit.Add(parameter, gradient, HowNow(), part));
  gradient.reset();  // it may lie in what is sent now
  if (!ours || !running_->reduce) return;
  ThrowIfError(LaunchReady(/*all=*/false));
}

MeanOptions Gradients::mean() const {
  const bool sums = running_->weight.has_value() || !options_.mean;
  const double base = sums ? 1 : comm_->world_size();
  return {options_.predivide, base / options_.predivide};
}

// Launches buckets from the last units to the first, as far as they are
// complete.
absl::Status Gradients::LaunchReady(bool all) {
  while (cursor_ < buckets_.size()) {
    std::vector<UnitGradient*> ready;
    for (UnitGradient* unit : buckets_[cursor_]) {
      if (!unit->AnyExpected()) continue;
      if (!all && !unit->Complete()) return absl::OkStatus();
      ready.push_back(unit);
    }
    if (ready.empty()) {
      ++cursor_;
      continue;
    }
    TESSERA_RETURN_IF_ERROR(FinishInFlight());
    TESSERA_ASSIGN_OR_RETURN(in_flight_,
                             Reduction::Start(std::move(ready), mean()));
    ++cursor_;  // whatever becomes of it
    if (!options_.overlap) TESSERA_RETURN_IF_ERROR(FinishInFlight());
  }
  return absl::OkStatus();
}

absl::Status Gradients::FinishInFlight() {
  if (in_flight_ == nullptr) return absl::OkStatus();
  const auto reduction = std::move(in_flight_);
  return CatchTorch(kReduction, [&] { return reduction->Finish(); });
}

absl::Status Gradients::Run(const std::function<void()>& backward,
                            const MicroBatch& micro_batch) {
  cursor_ = 0;
  for (auto& unit : units_) unit->Begin(micro_batch.may_nest);
  running_ = &micro_batch;
  runs_ = true;
  absl::Status mine;
  {
    OutermostTask outermost;
    const GradientPlaces::Backward places(places_.get());
    mine = CatchTorch("backward", backward);
  }
  ReleaseNodePins();
  TorchScope scope;
  absl::Status status = CatchTorch(kReduction, [&] {
    if (!micro_batch.reduce) return EndLocal(mine);
    TESSERA_RETURN_IF_ERROR(AgreeOnFailing(mine));
    mine.Update(local_failure_);  // of a backward that others are not in
    return ReduceRest(mine);
  });
  if (status.ok()) {
    if (micro_batch.reduce) ++num_reductions_;
  } else if (in_flight_ != nullptr) {  // thrown on the way
    comm_->Announce(status);
    (void)FinishInFlight();
    Discard();
  }
  running_ = nullptr;
  runs_ = false;
  return status;
}

// What a failed local micro-batch left cannot be told from the others' part: it
// fails the next one that is reduced, on all ranks.
absl::Status Gradients::EndLocal(const absl::Status& backward) {
  if (!backward.ok() && AnyGathersTogether() && AgreeOnFailing(backward).ok()) {
    // Nobody waits for the announcement any more once all are here.
    (void)comm_->AllGatherStrings("", CommTag{"agreement on failing"});
    comm_->ClearAnnouncement();
  }
  absl::Status status = backward;
  for (auto& unit : units_) {
    status.Update(CatchTorch(kReduction, [&] { return unit->Fold(); }));
  }
  local_failure_.Update(status);
  local_weight_ += running_->weight.value_or(0);
  return status;
}

absl::Status Gradients::ReduceRest(absl::Status mine) {
  absl::Status reduced =
      CatchTorch(kReduction, [&] { return LaunchReady(/*all=*/true); });
  reduced.Update(FinishInFlight());
  if (!reduced.ok()) {
    // The others wait in a reduction, not in the agreement.
    mine.Update(reduced);
    comm_->Announce(mine);
    Discard();
    return mine;
  }
  std::vector<bool> arrived, held;
  for (const auto& unit : units_) {
    for (size_t i = 0; i < unit->num_parameters(); ++i) {
      arrived.push_back(unit->arrived(i));
      held.push_back(unit->held(i));
    }
  }
  absl::Status agreed = Agree(mine, &arrived, &held);
  comm_->ClearAnnouncement();
  if (agreed.ok()) {
    agreed = CatchTorch(kReduction, [&] { return Commit(arrived, held); });
    if (!agreed.ok()) {  // halfway: no part of the step can be kept
      comm_->Announce(agreed);
      Zero();
    }
  }
  Discard();
  return agreed;
}

bool Gradients::AnyUsedWithoutGrad() const {
  return std::any_of(units_.begin(), units_.end(), [](const auto& gradient) {
    return gradient->unit().used_without_grad();
  });
}

bool Gradients::AnyGathersTogether() const {
  return std::any_of(units_.begin(), units_.end(), [](const auto& gradient) {
    return gradient->unit().gathers_together();
  });
}

// A rank that failed at stage 3 may have left others inside a gather that it
// will not join: they learn it from the announcement. Only if all failed alike
// can the engine go on.
absl::Status Gradients::AgreeOnFailing(const absl::Status& mine) {
  if (mine.ok()) return mine;
  if (!AnyGathersTogether()) {
    return absl::OkStatus();  // the others wait for the reductions only
  }
  comm_->Announce(mine);
  if (comm_->AllAnnounced(kAllFailedWait)) return absl::OkStatus();
  (void)FinishInFlight();
  Discard();
  return mine;
}

// The micro-batch becomes part of the step's gradients.
absl::Status Gradients::Commit(const std::vector<bool>& arrived,
                               const std::vector<bool>& held) {
  size_t first = 0;
  for (auto& unit : units_) {
    const size_t n = unit->num_parameters();
    std::vector<bool> came(arrived.begin() + first,
                           arrived.begin() + first + n);
    std::vector<bool> late(held.begin() + first, held.begin() + first + n);
    first += n;
    TESSERA_RETURN_IF_ERROR(unit->Commit(came));
    TESSERA_RETURN_IF_ERROR(
        unit->ReduceHeld(late, mean().predivide, mean().divisor));
    for (size_t i = 0; i < n; ++i) came[i] = came[i] || late[i];
    unit->set_expected(std::move(came));
  }
  return absl::OkStatus();
}

void Gradients::Discard() {
  local_weight_ = 0;
  local_failure_ = absl::OkStatus();
  for (auto& unit : units_) {
    unit->DropMicroBatch();
    for (const auto& p : unit->unit().parameters()) {
      p.tensor.mutable_grad().reset();
    }
  }
}

void Gradients::Zero() {
  Discard();
  num_reductions_ = 0;
  total_weight_ = 0;
  for (auto& unit : units_) unit->Zero();
}

absl::Status Gradients::CheckNothingPending() const {
  for (const auto& gradient : units_) {
    const auto& params = gradient->unit().parameters();
    for (size_t i = 0; i < params.size(); ++i) {
      if (!gradient->arrived(i) && !gradient->held(i) &&
          !params[i].tensor.grad().defined()) {
        continue;
      }
      return absl::FailedPreconditionError(absl::StrCat(
          "parameter '", params[i].name,
          "' has a gradient that is not reduced (of a bare loss.backward(), of "
          "a Backward within a NoSyncScope, or .grad() was set); call Backward "
          "once more, or ZeroGrad to drop it"));
    }
  }
  return absl::OkStatus();
}

absl::Status Gradients::CheckAttached() const {
  for (const auto& gradient : units_) {
    const Unit& unit = gradient->unit();
    for (const auto& p : unit.parameters()) {
      if (ArrivalHook::On(p.tensor, this) == nullptr) {
        return absl::FailedPreconditionError(absl::StrCat(
            "[", unit.name(), "] the post-accumulate-gradient hook of '",
            p.name,
            "' was replaced after Engine::Create; set hooks before Create "
            "(they are kept), or use tensor.register_hook"));
      }
      if (p.tensor.storage().unsafeGetStorageImpl() !=
          unit.storages()[p.slot].get()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "[", unit.name(), "] parameter '", p.name,
            "' no longer has the storage that the engine gave it (its data "
            "was replaced behind libtorch's dispatcher)"));
      }
    }
  }
  return absl::OkStatus();
}

int64_t Gradients::resident_bytes() const {
  int64_t bytes = 0;
  for (const auto& unit : units_) bytes += unit->resident_bytes();
  return bytes;
}

}  // namespace tessera
