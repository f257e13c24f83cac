// Run, and what it does in the order in which it does it: hooks (Arrived), sums
// (LaunchReady), the agreement (gradients_agreement.cc), Commit.
//
// Why sums are launched in one order that is fixed at Create, whatever order
// gradients arrive in: collectives match by their order. Ranks whose graphs
// differ would otherwise sum one rank's gradients of one flat with another's of
// another. So a bucket that is complete waits for those before it, and one in
// which this rank has nothing is summed with zeros.
//
// Why nothing becomes part of the step's gradients before the agreement: the
// sums do not tell that a rank failed in its backward, since it takes part in
// them all the same. Without the agreement the others would step, with samples
// missing, while that rank does not: from there on the ranks' values would
// differ.
#include "sharding/gradient/gradients.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch/tensor_memory.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "sharding/dispatch/saved_tensors.h"
#include "torch/csrc/autograd/function_hook.h"
#include "torch/csrc/autograd/graph_task.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

namespace autograd = torch::autograd;

constexpr char kReduction[] = "reduction of gradients";

}  // namespace

class Gradients::ArrivalHook : public autograd::PostAccumulateGradHook {
 public:
  ArrivalHook(Gradients* owner, int flat, int parameter,
              std::unique_ptr<autograd::PostAccumulateGradHook> previous)
      : owner_(owner),
        flat_(flat),
        parameter_(parameter),
        previous_(std::move(previous)) {}

  void operator()(const at::Tensor& tensor) override {
    if (previous_ != nullptr) (*previous_)(tensor);
    owner_->Arrived(flat_, parameter_, tensor);
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
  int flat_, parameter_;
  std::unique_ptr<autograd::PostAccumulateGradHook> previous_;
};

Gradients::Gradients(const std::vector<std::shared_ptr<FlatParameter>>& flats,
                     std::shared_ptr<Communicator> comm,
                     GradientOptions options, std::vector<bool> expected)
    : comm_(std::move(comm)),
      options_(options),
      stream_(flats.empty() ? at::Device(at::kCPU) : flats[0]->device()) {
  auto next = expected.begin();
  for (size_t u = 0; u < flats.size(); ++u) {
    const auto& params = flats[u]->parameters();
    const auto end = next + static_cast<int64_t>(params.size());
    flats_.push_back(
        std::make_unique<FlatGradient>(flats[u], std::vector<bool>(next, end)));
    next = end;
    accesses_.emplace_back();
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& tensor = params[i].tensor;
      // Also makes room for the hook where there never was a gradient.
      accesses_.back().push_back(CountGradAccesses(tensor));
      autograd::impl::set_post_acc_grad_hooks(
          tensor, std::make_unique<ArrivalHook>(
                      this, static_cast<int>(u), static_cast<int>(i),
                      std::move(autograd::impl::post_acc_grad_hooks(tensor))));
    }
  }
  half_ = options.half ||
          std::any_of(flats.begin(), flats.end(), [](const auto& flat) {
            return flat->dtype() == at::kHalf ||
                   flat->reduce_dtype() == at::kHalf ||
                   flat->gradient_dtype() == at::kHalf;
          });
  MakeBuckets();
}

void Gradients::MakeBuckets() {
  int64_t numel = 0;
  const FlatParameter* last = nullptr;
  for (auto it = flats_.rbegin(); it != flats_.rend(); ++it) {
    const FlatParameter& flat = (*it)->flat();
    const int64_t more = flat.layout().whole_numel();
    const Stage stage = flat.stage();
    // Alone there is no cost to share.
    const bool fits =
        comm_->world_size() > 1 && last != nullptr &&
        numel + more <= options_.bucket_numel &&
        flat.reduce_dtype() == last->reduce_dtype() &&
        flat.device() == last->device() &&
        stage.sharded_gradients == last->stage().sharded_gradients;
    if (!fits) {
      buckets_.emplace_back();
      numel = 0;
    }
    buckets_.back().push_back(it->get());
    numel += more;
    last = &flat;
  }
}

Gradients::~Gradients() {
  (void)CatchTorch(kReduction, [this] { stream_.Enter(); });
  for (const auto& flat : flats_) {
    for (const auto& p : flat->flat().parameters()) {
      if (auto* hook = ArrivalHook::On(p.tensor, this)) {
        autograd::impl::set_post_acc_grad_hooks(p.tensor, hook->TakePrevious());
      }
    }
  }
  (void)FinishInFlight();  // a collective may still write into our buffers
}

FlatGradient::Arrival Gradients::HowNow() const {
  using How = FlatGradient::Arrival;
  if (running().weight.value_or(1.0) == 0.0) return How::kZero;
  return running().reduce ? How::kAdd : How::kAccumulateLocally;
}

void Gradients::Arrived(int flat_index, int parameter,
                        const at::Tensor& tensor) {
  if (!runs()) {  // the user's own backward, or another engine's
    any_outside_.store(true, std::memory_order_relaxed);
    GradAccesses* const accesses = accesses_[static_cast<size_t>(flat_index)]
                                            [static_cast<size_t>(parameter)];
    if (accesses != nullptr) --accesses->changes;  // libtorch's, to accumulate
    return;
  }
  TorchScope scope;
  absl::MutexLock lock(&mutex_);
  stream_.Enter();
  FlatGradient& flat = *flats_[static_cast<size_t>(flat_index)];
  at::Tensor gradient = std::move(tensor.mutable_grad());
  if (!gradient.defined()) return;
  if (gradient.layout() != at::kStrided && !gradient.is_sparse()) {
    gradient = gradient.to_dense();
  }
  if (autograd::get_current_graph_task_id() != OutermostTask::id()) {
    flat.SetLate();
  }
  ThrowIfError(flat.Add(parameter, gradient, HowNow(), flat.late()));
  gradient.reset();  // before the sums take memory
  if (!running().reduce) return;
  ThrowIfError(LaunchReady(/*all=*/false));
}

// Launches buckets from the last flats to the first, as far as they are
// complete.
absl::Status Gradients::LaunchReady(bool all) {
  while (cursor_ < buckets_.size()) {
    std::vector<FlatGradient*> ready;
    for (FlatGradient* flat : buckets_[cursor_]) {
      if (!flat->AnyExpected()) continue;
      if (!all && !flat->Complete()) return absl::OkStatus();
      ready.push_back(flat);
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
  TESSERA_RETURN_IF_ERROR(FinishStoring());
  storing_ = reduction->flats();
  TESSERA_RETURN_IF_ERROR(
      CatchTorch(kReduction, [&] { return reduction->Finish(); }));
  return TellReduced(/*stored=*/false);
}

absl::Status Gradients::FinishStoring() {
  absl::Status status;
  for (FlatGradient* flat : storing_) status.Update(flat->FinishStore());
  if (status.ok()) status = TellReduced(/*stored=*/true);
  storing_.clear();
  return status;
}

// Calls MicroBatch::reduced for the flats of storing_ whose sums become the
// step's gradient without further work: those in memory, or with `stored` those
// that are elsewhere.
absl::Status Gradients::TellReduced(bool stored) {
  if (!runs() || failed_ || running().reduced == nullptr) {
    return absl::OkStatus();
  }
  if (running().uses_up) ReleaseEndedNodePins();  // of whoever computed them
  for (FlatGradient* flat : storing_) {
    if (flat->accumulating() || (flat->elsewhere() != nullptr) != stored) {
      continue;
    }
    const auto place =
        std::find_if(flats_.begin(), flats_.end(),
                     [&](const auto& each) { return each.get() == flat; });
    TESSERA_RETURN_IF_ERROR(
        running().reduced(static_cast<size_t>(place - flats_.begin())));
  }
  return absl::OkStatus();
}

absl::Status Gradients::Run(const std::function<void()>& backward,
                            const MicroBatch& micro_batch) {
  cursor_ = 0;
  any_used_up_ = micro_batch.uses_up;  // until Agree
  running_ = &micro_batch;
  stream_.Enter();
  absl::Status mine = CatchTorch("backward", [&] { return TakeOutside(); });
  for (auto& flat : flats_) flat->Begin(micro_batch.may_nest);
  if (mine.ok()) {
    OutermostTask outermost;
    mine = CatchTorch("backward", backward);
  }
  ReleaseNodePins();
  TorchScope scope;
  failed_ = !mine.ok();
  stream_.Enter();
  absl::Status status = CatchTorch(kReduction, [&] {
    if (!micro_batch.reduce) return EndLocal(mine);
    TESSERA_RETURN_IF_ERROR(AgreeOnFailing(mine));
    mine.Update(local_failure_);  // of a backward that others are not in
    return ReduceRest(mine);
  });
  if (status.ok()) {
    if (micro_batch.reduce) ++num_reductions_;
  } else if (in_flight_ != nullptr) {  // thrown on the way
    everyone().Announce(status);
    (void)FinishInFlight();
    Discard();
  }
  running_ = nullptr;
  failed_ = false;
  ForgetAccesses();
  return status;
}

// What a failed local micro-batch left cannot be told from the others' part: it
// fails the next one that is reduced, on all ranks.
absl::Status Gradients::EndLocal(const absl::Status& backward) {
  if (!backward.ok() && AnyGathersTogether() && AgreeOnFailing(backward).ok()) {
    // Nobody waits for the announcement any more once all are here.
    (void)everyone().AllGatherStrings("", CommTag{"agreement on failing"});
    everyone().ClearAnnouncement();
  }
  absl::Status status = backward;
  for (auto& flat : flats_) {
    status.Update(CatchTorch(kReduction, [&] { return flat->Fold(); }));
  }
  local_failure_.Update(status);
  if (!running().another_loss) local_weight_ += running().weight.value_or(0);
  return status;
}

absl::Status Gradients::ReduceRest(absl::Status mine) {
  absl::Status reduced =
      CatchTorch(kReduction, [&] { return LaunchReady(/*all=*/true); });
  reduced.Update(FinishInFlight());
  reduced.Update(FinishStoring());
  if (!reduced.ok()) {
    // The others wait in a reduction, not in the agreement.
    mine.Update(reduced);
    everyone().Announce(mine);
    Discard();
    return mine;
  }
  std::vector<bool> arrived, held;
  for (const auto& flat : flats_) {
    for (size_t i = 0; i < flat->num_parameters(); ++i) {
      arrived.push_back(flat->arrived(i));
      held.push_back(flat->held(i));
    }
  }
  absl::Status agreed = Agree(mine, &arrived, &held);
  everyone().ClearAnnouncement();
  if (agreed.ok()) {
    agreed = CatchTorch(kReduction, [&] { return Commit(arrived, held); });
    if (!agreed.ok()) {  // halfway: no part of the step can be kept
      everyone().Announce(agreed);
      Zero();
    }
  }
  Discard();
  return agreed;
}

// The micro-batch becomes part of the step's gradients. All ranks know from the
// agreement what any of them held, so all launch the sums of that, in this
// order. Sums come back from elsewhere while those of the unit before leave.
absl::Status Gradients::Commit(const std::vector<bool>& arrived,
                               const std::vector<bool>& held) {
  size_t first = 0;
  FlatGradient* leaves = nullptr;
  for (auto& flat : flats_) {
    const size_t n = flat->num_parameters(), end = first + n;
    std::vector<bool> came(arrived.begin() + first, arrived.begin() + end);
    const std::vector<bool> late(held.begin() + first, held.begin() + end);
    first = end;
    TESSERA_RETURN_IF_ERROR(CheckNoneLate(*flat, came, late));
    TESSERA_RETURN_IF_ERROR(flat->Commit(came));
    if (std::find(late.begin(), late.end(), true) != late.end()) {
      TESSERA_ASSIGN_OR_RETURN(const auto reduction,
                               Reduction::StartHeld(flat.get(), mean()));
      TESSERA_RETURN_IF_ERROR(reduction->Finish());
      TESSERA_RETURN_IF_ERROR(flat->FinishStore());
      TESSERA_RETURN_IF_ERROR(flat->Commit(late));
    }
    if (leaves != nullptr) TESSERA_RETURN_IF_ERROR(leaves->FinishStore());
    leaves = flat.get();
    for (size_t i = 0; i < n; ++i) came[i] = came[i] || late[i];
    flat->set_expected(came);
  }
  return leaves == nullptr ? absl::OkStatus() : leaves->FinishStore();
}

void Gradients::Discard() {
  (void)FinishStoring();  // of what is dropped
  local_weight_ = 0;
  local_failure_ = absl::OkStatus();
  for (auto& flat : flats_) {
    flat->DropMicroBatch();
    for (const auto& p : flat->flat().parameters()) {
      p.tensor.mutable_grad().reset();
    }
  }
}

void Gradients::Zero() {
  stream_.Enter();
  Discard();
  num_reductions_ = 0;
  measure_ = WeightMeasure();
  total_weight_ = 0;
  for (auto& flat : flats_) {
    flat->Zero();
    if (options_.uses_up) flat->DropLocal();
  }
  ForgetAccesses();
}

absl::Status Gradients::CheckAttached() const {
  for (const auto& gradient : flats_) {
    const FlatParameter& flat = gradient->flat();
    for (const auto& p : flat.parameters()) {
      if (ArrivalHook::On(p.tensor, this) == nullptr) {
        return absl::FailedPreconditionError(absl::StrCat(
            "[", flat.name(), "] the post-accumulate-gradient hook of '",
            p.name,
            "' was replaced after Engine::Create; set hooks before Create "
            "(they are kept), or use tensor.register_hook"));
      }
      if (p.tensor.storage().unsafeGetStorageImpl() !=
          flat.storages()[p.slot].get()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "[", flat.name(), "] parameter '", p.name,
            "' no longer has the storage that the engine gave it (its data "
            "was replaced behind libtorch's dispatcher)"));
      }
    }
  }
  return absl::OkStatus();
}

int64_t Gradients::resident_bytes() const {
  if (options_.uses_up) return 0;
  int64_t bytes = 0;
  for (const auto& flat : flats_) bytes += flat->resident_bytes();
  return bytes;
}

}  // namespace tessera
