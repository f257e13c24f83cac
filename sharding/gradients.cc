#include "sharding/gradients.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "sharding/saved_tensors.h"
#include "sharding/torch_scope.h"
#include "torch/csrc/autograd/function_hook.h"
#include "torch/csrc/autograd/graph_task.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

namespace autograd = torch::autograd;

// How many reductions may be on their way while backward goes on.
constexpr size_t kInFlight = 2;
// How long a rank that failed waits for the others to say that they did too.
constexpr absl::Duration kAllFailedWait = absl::Seconds(4);

std::string PackBits(const std::vector<bool>& bits) {
  std::string bytes((bits.size() + 7) / 8, '\0');
  for (size_t i = 0; i < bits.size(); ++i) {
    if (bits[i]) bytes[i / 8] |= static_cast<char>(1 << (i % 8));
  }
  return bytes;
}

void OrBits(absl::string_view bytes, std::vector<bool>* bits) {
  for (size_t i = 0; i < bits->size(); ++i) {
    if (bytes[i / 8] & (1 << (i % 8))) (*bits)[i] = true;
  }
}

}  // namespace

// What a unit's gradient is going through.
struct Gradients::State {
  std::shared_ptr<Unit> unit;
  FlatBuffer local;    // [P]
  FlatBuffer reduced;  // [owned], unless in_place
  FlatBuffer scratch;  // [owned], a micro-batch's sum while accumulating
  // The step's gradient is the owned range of `local` itself.
  bool in_place = false;
  std::vector<bool> arrived;     // in `local`, not yet reduced
  std::vector<at::Tensor> held;  // to be reduced after the agreement
  bool launched = false;         // in this backward
  bool late = false;             // more may come: complete only at the end
  CommFuture pending;

  int first() const { return unit->parameters()[0].index; }
  size_t size() const { return unit->parameters().size(); }
  bool accumulating(const std::vector<bool>& has_gradient) const {
    for (size_t i = 0; i < size(); ++i) {
      if (has_gradient[first() + i]) return true;
    }
    return false;
  }
  void ClearMicroBatch() {
    arrived.assign(size(), false);
    held.assign(size(), at::Tensor());
    launched = late = false;
    scratch.Reset();
    if (unit->stage().sharded_gradients) local.Reset();
  }
};

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
  const Gradients* owner() const { return owner_; }
  std::unique_ptr<autograd::PostAccumulateGradHook> TakePrevious() {
    return std::move(previous_);
  }
  // The hook of `owner` on `tensor`, or null.
  static ArrivalHook* On(const at::Tensor& tensor, const Gradients* owner) {
    auto* hook = dynamic_cast<ArrivalHook*>(
        autograd::impl::post_acc_grad_hooks(tensor).get());
    return hook != nullptr && hook->owner() == owner ? hook : nullptr;
  }

 private:
  Gradients* owner_;
  int unit_, parameter_;
  std::unique_ptr<autograd::PostAccumulateGradHook> previous_;
};

Gradients::Gradients(std::vector<std::shared_ptr<Unit>> units,
                     std::shared_ptr<Communicator> comm,
                     std::vector<bool> expected)
    : comm_(std::move(comm)),
      expected_(std::move(expected)),
      has_gradient_(expected_.size(), false) {
  for (size_t u = 0; u < units.size(); ++u) {
    auto state = std::make_unique<State>();
    state->unit = std::move(units[u]);
    state->ClearMicroBatch();
    const auto& params = state->unit->parameters();
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& tensor = params[i].tensor;
      autograd::impl::set_post_acc_grad_hooks(
          tensor, std::make_unique<ArrivalHook>(
                      this, static_cast<int>(u), static_cast<int>(i),
                      std::move(autograd::impl::post_acc_grad_hooks(tensor))));
    }
    states_.push_back(std::move(state));
  }
}

Gradients::~Gradients() {
  for (const auto& state : states_) {
    for (const auto& p : state->unit->parameters()) {
      if (auto* hook = ArrivalHook::On(p.tensor, this)) {
        autograd::impl::set_post_acc_grad_hooks(p.tensor, hook->TakePrevious());
      }
    }
  }
  (void)FinishAll();  // a collective may still write into our buffers
}

void Gradients::Arrived(int unit, int parameter, const at::Tensor& tensor) {
  TorchScope scope;
  absl::MutexLock lock(&mutex_);
  State& state = *states_[unit];
  at::Tensor gradient = tensor.grad();
  if (!gradient.defined()) return;
  if (gradient.layout() != at::kStrided) gradient = gradient.to_dense();
  const bool expected = expected_[state.first() + parameter];
  if (state.launched || !expected) {
    at::Tensor& held = state.held[parameter];
    held = held.defined() ? held + gradient : gradient;
  } else {
    Store(state, parameter, gradient);
  }
  tensor.mutable_grad().reset();
  if (!running_) return;
  if (autograd::get_current_graph_task_id() != OutermostTask::id()) {
    state.late = true;
  }
  ThrowIfError(LaunchReady(/*all=*/false));
}

// Adds a gradient to the unit's local flat gradient; the first one is copied.
void Gradients::Store(State& state, int parameter, const at::Tensor& gradient) {
  const Unit& unit = *state.unit;
  const auto& p = unit.parameters()[parameter];
  ThrowIfError(EnsureLocal(state));
  at::Tensor place =
      TensorOver(state.local.data() + p.flat.begin, p.tensor.sizes(),
                 p.tensor.strides(), unit.dtype(), unit.device());
  if (state.arrived[parameter]) {
    place.add_(gradient);
  } else {
    place.copy_(gradient);
  }
  state.arrived[parameter] = true;
}

// `local` ready to take this micro-batch's gradients. Where it holds the step's
// gradient so far, that moves out first.
absl::Status Gradients::EnsureLocal(State& state) {
  if (state.in_place) {
    FlatBuffer moved;
    const ByteRange owned = state.unit->owned();
    TESSERA_ASSIGN_OR_RETURN(
        moved, FlatBuffer::Allocate(owned.bytes(), state.unit->device(),
                                    MemoryKind::kGradients));
    CopyBytes(state.unit->device(), moved.data(),
              state.local.data() + owned.begin, owned.bytes());
    state.reduced = std::move(moved);
    state.in_place = false;
  }
  if (state.local.defined()) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(
      state.local,
      FlatBuffer::Allocate(state.unit->layout().whole_bytes(),
                           state.unit->device(), MemoryKind::kGradients));
  return absl::OkStatus();
}

absl::Status Gradients::EnsureReduced(State& state) {
  if (state.in_place || state.reduced.defined()) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(
      state.reduced,
      FlatBuffer::Allocate(state.unit->owned().bytes(), state.unit->device(),
                           MemoryKind::kGradients));
  return absl::OkStatus();
}

bool Gradients::AnyExpected(const State& state) const {
  for (size_t i = 0; i < state.size(); ++i) {
    if (expected_[state.first() + i]) return true;
  }
  return false;
}

bool Gradients::Complete(const State& state) const {
  if (state.late || state.unit->used_without_grad()) return false;
  for (size_t i = 0; i < state.size(); ++i) {
    if (expected_[state.first() + i] && !state.arrived[i]) return false;
  }
  return true;
}

// Launches units from the last to the first, as far as they are complete.
absl::Status Gradients::LaunchReady(bool all) {
  while (cursor_ < states_.size()) {
    State& state = *states_[states_.size() - 1 - cursor_];
    if (AnyExpected(state)) {
      if (!all && !Complete(state)) return absl::OkStatus();
      TESSERA_RETURN_IF_ERROR(Launch(state));
    }
    ++cursor_;
  }
  return absl::OkStatus();
}

absl::Status Gradients::Launch(State& state) {
  const Unit& unit = *state.unit;
  const Stage stage = unit.stage();
  TESSERA_RETURN_IF_ERROR(EnsureLocal(state));
  // What did not arrive counts as zero here: another rank may have it.
  for (size_t i = 0; i < state.size(); ++i) {
    if (state.arrived[i]) continue;
    const ByteRange r = unit.parameters()[i].flat;
    state.local.View(at::kByte, r).zero_();
  }
  const CommTag tag{
      absl::StrCat("reduction of the gradients of unit ", unit.name())};
  if (!stage.sharded_optimizer) {
    state.pending = comm_->AllReduceSum(state.local.View(unit.dtype()), tag);
  } else {
    at::Tensor target;
    if (!stage.sharded_gradients) {
      target = state.local.View(unit.dtype(), unit.owned());
    } else if (state.accumulating(has_gradient_)) {
      TESSERA_ASSIGN_OR_RETURN(
          state.scratch,
          FlatBuffer::Allocate(unit.owned().bytes(), unit.device(),
                               MemoryKind::kGradients));
      target = state.scratch.View(unit.dtype());
    } else {
      TESSERA_RETURN_IF_ERROR(EnsureReduced(state));
      target = state.reduced.View(unit.dtype());
    }
    state.pending =
        comm_->ReduceScatterSum(state.local.View(unit.dtype()), target, tag);
  }
  state.launched = true;
  in_flight_.push_back(&state);
  while (in_flight_.size() > kInFlight) {
    State* oldest = in_flight_.front();
    in_flight_.pop_front();
    TESSERA_RETURN_IF_ERROR(Finish(*oldest));
  }
  return absl::OkStatus();
}

absl::Status Gradients::Finish(State& state) {
  TESSERA_RETURN_IF_ERROR(state.pending.Wait());
  if (state.unit->stage().sharded_gradients) state.local.Reset();
  return absl::OkStatus();
}

absl::Status Gradients::FinishAll() {
  absl::Status first;
  for (State* state : in_flight_) first.Update(Finish(*state));
  in_flight_.clear();
  return first;
}

absl::Status Gradients::Reduce(const std::function<void()>& backward) {
  cursor_ = 0;
  absl::Status mine;
  {
    running_ = true;
    OutermostTask outermost;
    mine = CatchTorch("backward", backward);
    running_ = false;
  }
  ReleaseNodePins();
  TorchScope scope;
  if (!mine.ok()) TESSERA_RETURN_IF_ERROR(AgreeOnFailing(mine));
  mine.Update(LaunchReady(/*all=*/true));
  mine.Update(FinishAll());

  std::vector<bool> arrived(expected_.size()), held(expected_.size());
  for (const auto& state : states_) {
    for (size_t i = 0; i < state->size(); ++i) {
      arrived[state->first() + i] = state->arrived[i];
      held[state->first() + i] = state->held[i].defined();
    }
  }
  absl::Status agreed = Agree(mine, &arrived, &held);
  comm_->ClearAnnouncement();
  for (auto& state : states_) {
    if (!agreed.ok()) break;
    agreed = Commit(*state, arrived);
    if (agreed.ok()) agreed = ReduceHeld(*state, held);
  }
  for (size_t i = 0; i < expected_.size(); ++i) {
    expected_[i] = agreed.ok() ? arrived[i] || held[i] : expected_[i];
  }
  Discard();
  return agreed;
}

// A rank that failed at stage 3 may have left others inside a gather that it
// will not join: they learn it from the announcement. Only if all failed alike
// can the engine go on.
absl::Status Gradients::AgreeOnFailing(const absl::Status& mine) {
  if (!states_.empty() && !states_[0]->unit->stage().sharded_parameters) {
    return absl::OkStatus();  // the others wait for the reductions only
  }
  comm_->Announce(mine);
  if (comm_->AllAnnounced(kAllFailedWait)) return absl::OkStatus();
  (void)FinishAll();
  Discard();
  return mine;
}

// One message per rank: status, and which parameters arrived or are held.
absl::Status Gradients::Agree(const absl::Status& mine,
                              std::vector<bool>* arrived,
                              std::vector<bool>* held) {
  const size_t bytes = (arrived->size() + 7) / 8;
  std::string message = absl::StrCat(PackBits(*arrived), PackBits(*held));
  message.push_back(static_cast<char>(mine.code()));
  absl::StrAppend(&message, mine.message());
  TESSERA_ASSIGN_OR_RETURN(
      auto all, comm_->AllGatherStrings(
                    message, CommTag{"agreement at the end of backward"}));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const absl::string_view theirs = all[rank];
    const auto code = static_cast<absl::StatusCode>(theirs[2 * bytes]);
    if (code == absl::StatusCode::kOk) {
      OrBits(theirs, arrived);
      OrBits(theirs.substr(bytes), held);
      continue;
    }
    if (static_cast<int>(rank) == comm_->rank()) return mine;
    return absl::Status(
        code,
        absl::StrCat("rank ", rank, " failed: ", theirs.substr(2 * bytes + 1)));
  }
  return absl::OkStatus();
}

// dst += or = the owned part of a parameter's averaged gradient.
void Gradients::Accumulate(State& state, int parameter,
                           const char* owned_from) {
  const Unit& unit = *state.unit;
  char* to = state.in_place ? state.local.data() + unit.owned().begin
                            : state.reduced.data();
  const int index = state.first() + parameter;
  for (const auto& segment : unit.segments()) {
    if (segment.parameter != parameter) continue;
    const int64_t offset = segment.flat.begin - unit.owned().begin;
    const int64_t numel = segment.flat.bytes() / unit.item_bytes();
    auto dst =
        TensorOver(to + offset, {numel}, {1}, unit.dtype(), unit.device());
    auto src = TensorOver(const_cast<char*>(owned_from) + offset, {numel}, {1},
                          unit.dtype(), unit.device());
    if (has_gradient_[index]) {
      dst.add_(src);
    } else {
      dst.copy_(src);
    }
  }
}

// The micro-batch's sums become part of the step's gradients.
absl::Status Gradients::Commit(State& state, const std::vector<bool>& arrived) {
  if (!state.launched) return absl::OkStatus();
  const Unit& unit = *state.unit;
  const bool sharded = unit.stage().sharded_gradients;
  const bool accumulating = state.accumulating(has_gradient_);
  FlatBuffer& sums = !sharded       ? state.local
                     : accumulating ? state.scratch
                                    : state.reduced;
  const ByteRange range = sharded ? ByteRange{0, sums.bytes()} : unit.owned();
  if (comm_->world_size() > 1) {
    sums.View(unit.dtype(), range).div_(comm_->world_size());
  }
  if (accumulating) {
    TESSERA_RETURN_IF_ERROR(EnsureReduced(state));
    for (size_t i = 0; i < state.size(); ++i) {
      if (arrived[state.first() + i]) {
        Accumulate(state, static_cast<int>(i), sums.data() + range.begin);
      }
    }
  } else if (!sharded) {
    state.in_place = true;
    state.reduced.Reset();
  }
  for (size_t i = 0; i < state.size(); ++i) {
    if (arrived[state.first() + i]) has_gradient_[state.first() + i] = true;
  }
  return absl::OkStatus();
}

absl::Status Gradients::ReduceHeld(State& state,
                                   const std::vector<bool>& held) {
  const Unit& unit = *state.unit;
  bool any = false;
  for (size_t i = 0; i < state.size(); ++i) {
    any = any || held[state.first() + i];
  }
  if (!any) return absl::OkStatus();
  FlatBuffer whole;
  TESSERA_ASSIGN_OR_RETURN(
      whole, FlatBuffer::Allocate(unit.layout().whole_bytes(), unit.device(),
                                  MemoryKind::kGradients));
  for (size_t i = 0; i < state.size(); ++i) {
    if (!state.held[i].defined()) continue;
    const auto& p = unit.parameters()[i];
    TensorOver(whole.data() + p.flat.begin, p.tensor.sizes(),
               p.tensor.strides(), unit.dtype(), unit.device())
        .copy_(state.held[i]);
  }
  const CommTag tag{
      absl::StrCat("reduction of late gradients of unit ", unit.name())};
  at::Tensor all = whole.View(unit.dtype());
  at::Tensor mine = whole.View(unit.dtype(), unit.owned());
  CommFuture done = unit.stage().sharded_optimizer
                        ? comm_->ReduceScatterSum(all, mine, tag)
                        : comm_->AllReduceSum(all, tag);
  TESSERA_RETURN_IF_ERROR(done.Wait());
  if (comm_->world_size() > 1) mine.div_(comm_->world_size());
  TESSERA_RETURN_IF_ERROR(EnsureReduced(state));
  for (size_t i = 0; i < state.size(); ++i) {
    const int index = state.first() + static_cast<int>(i);
    if (!held[index]) continue;
    Accumulate(state, static_cast<int>(i), whole.data() + unit.owned().begin);
    has_gradient_[index] = true;
  }
  return absl::OkStatus();
}

void Gradients::Discard() {
  for (auto& state : states_) {
    state->ClearMicroBatch();
    for (const auto& p : state->unit->parameters()) {
      p.tensor.mutable_grad().reset();
    }
  }
}

void Gradients::Zero() {
  Discard();
  for (auto& state : states_) {
    state->in_place = false;
    state->unit->TakeUsedWithoutGrad();
    if (!state->unit->stage().sharded_gradients) state->reduced.Reset();
  }
  has_gradient_.assign(has_gradient_.size(), false);
}

char* Gradients::owned_gradient(int unit) const {
  const State& state = *states_[unit];
  if (state.in_place) return state.local.data() + state.unit->owned().begin;
  return state.reduced.defined() ? state.reduced.data() : nullptr;
}

absl::StatusOr<at::Tensor> Gradients::Whole(int unit_index, int parameter) {
  const State& state = *states_[unit_index];
  const Unit& unit = *state.unit;
  if (!has_gradient_[state.first() + parameter]) return at::Tensor();
  TorchScope scope;
  FlatBuffer whole;
  TESSERA_ASSIGN_OR_RETURN(
      whole, FlatBuffer::Allocate(unit.layout().whole_bytes(), unit.device(),
                                  MemoryKind::kWorking));
  CopyBytes(unit.device(), whole.data() + unit.owned().begin,
            owned_gradient(unit_index), unit.owned().bytes());
  if (unit.stage().sharded_optimizer) {
    TESSERA_RETURN_IF_ERROR(
        comm_
            ->AllGather(whole.View(unit.dtype(), unit.owned()),
                        whole.View(unit.dtype()), CommTag{"Gradient"})
            .Wait());
  }
  const auto& p = unit.parameters()[parameter];
  return TensorOver(whole.data() + p.flat.begin, p.tensor.sizes(),
                    p.tensor.strides(), unit.dtype(), unit.device())
      .clone();
}

absl::Status Gradients::CheckAttached() const {
  for (const auto& state : states_) {
    const Unit& unit = *state->unit;
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
  for (const auto& state : states_) {
    bytes += state->unit->stage().sharded_gradients
                 ? state->unit->owned().bytes()
                 : state->unit->layout().whole_bytes();
  }
  return bytes;
}

}  // namespace tessera
