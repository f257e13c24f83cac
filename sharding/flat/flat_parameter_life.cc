// How a flat parameter comes to own its parameters' memory, and gives it back;
// and the time in which nobody uses it.
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch/storage_access.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "offload/remainders.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/flat/registry.h"
#include "sharding/flat/whole_values.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

std::string FreedError(const std::string& parameter, const std::string& flat,
                       bool can_be_freed) {
  return absl::StrCat(
      "[", flat, "] parameter '", parameter,
      can_be_freed ? "' is sharded and freed between uses"
                   : "' is being brought up to date after a step",
      ", and its memory was asked for outside of an operator (a raw data "
      "pointer, torch::save, or an alias that the engine does not know). Hold "
      "`auto pin = tessera::Use(w);` around the access.");
}

// Neither the schedule nor an operator finds it from here on.
void Forget(FlatParameter* flat) {
  for (const auto& storage : flat->storages()) {
    Registry::Global().Remove(storage.get());
  }
  flat->schedule()->Forget(flat);
}

}  // namespace

FlatParameter::FlatParameter(std::string name,
                             std::vector<NamedParameter> params,
                             const FlatParameterOptions& options,
                             std::shared_ptr<Communicator> comm,
                             std::shared_ptr<Schedule> schedule)
    : FlatDescription(std::move(name), std::move(params), options,
                      std::move(comm)),
      schedule_(std::move(schedule)),
      states_(std::make_unique<ShardStates>(this->name(), owned().numel(),
                                            device(),
                                            this->options().stream.get())),
      storages_(this),
      uses_(device()) {}

absl::StatusOr<std::shared_ptr<FlatParameter>> FlatParameter::Prepare(
    std::string name, std::vector<NamedParameter> params,
    const FlatParameterOptions& options, std::shared_ptr<Communicator> comm,
    std::shared_ptr<Schedule> schedule) {
  TorchScope scope;
  auto flat = std::shared_ptr<FlatParameter>(
      new FlatParameter(std::move(name), std::move(params), options,
                        std::move(comm), std::move(schedule)));
  absl::MutexLock lock(&flat->mutex_);
  ShardStates* const states = flat->states_.get();
  TESSERA_ASSIGN_OR_RETURN(
      flat->copy_,
      WorkingCopy::Make(flat.get(), states, flat->schedule_->live_counter()));
  flat->traits_ = flat->copy_->traits();
  if (flat->trainable() && flat->separate_masters()) {
    TESSERA_RETURN_IF_ERROR(
        states->Add(ShardStates::kMasters, flat->kept_master_dtype(),
                    flat->options().PlaceOf(flat->options().states_tier)));
  }
  // What lies elsewhere is filled in memory: by Adopt, which refuses nothing.
  TESSERA_RETURN_IF_ERROR(states->ForEach(
      [](ShardStates::State, TieredBuffer& buffer) { return buffer.Raise(); }));
  return flat;
}

// The registry comes last: who finds a flat there may pin it at once.
absl::Status FlatParameter::Adopt() {
  TorchScope scope;
  {
    absl::MutexLock lock(&mutex_);
    life_ = Life::kOwned;
    TESSERA_RETURN_IF_ERROR(TakeStorages());
    TESSERA_RETURN_IF_ERROR(
        states_->ForEach([](ShardStates::State, TieredBuffer& buffer) {
          return buffer.Lower(/*changed=*/true);
        }));
    storages_.Follow(copy_->whole());
    for (const auto& p : parameters()) AddTag(p.tensor);
    states_->SetChanged();
    uses_.SetReady();
    ready_ = !traits_.can_be_freed && device().is_cpu();
    copy_->Offer();
  }
  for (size_t i = 0; i < storages().size(); ++i) {
    const int slot = static_cast<int>(i);
    Registry::Global().Add(storages()[i].get(), {shared_from_this(), slot,
                                                 &ParameterOfSlot(slot).name});
  }
  return absl::OkStatus();
}

// What is kept of the parameters' values goes where it is kept.
absl::Status FlatParameter::TakeStorages() {
  return storages_.TakeOver(
      [this](int i,
             const at::Tensor& values) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        const Range slot = layout().slot(i);
        copy_->Take(slot, splits_masters() ? RoundTiesAway(values) : values);
        const Range mine = Intersect(slot, owned());
        if (mine.empty() || !states_->has(ShardStates::kMasters)) return;
        const at::Tensor values_of_mine =
            values.narrow(0, mine.begin - slot.begin, mine.numel());
        const Range to = {mine.begin - owned().begin, mine.end - owned().begin};
        const at::Tensor masters = states_->At(ShardStates::kMasters).View(to);
        if (states_->splits()) {
          SplitMasters(values_of_mine,
                       states_->At(ShardStates::kWorking).View(to), masters);
        } else {
          masters.copy_(values_of_mine);
        }
      },
      [this](const std::string& parameter) {
        return FreedError(parameter, name(), traits_.can_be_freed);
      });
}

void FlatParameter::SetStepped(absl::string_view how) {
  stepped_ = absl::FailedPreconditionError(
      absl::StrCat("[", name(), "] the unit ", how,
                   " Engine::Step (sharding.step_in_backward); use it "
                   "earlier, or after Step, or leave that key out"));
  ready_ = false;  // the next pin takes the lock, and fails
}

// A pin that takes no lock is counted before it looks at ready_ again, and here
// pins are looked at after ready_ was set: one of the two sees the other.
absl::StatusOr<bool> FlatParameter::TryPrepareUpdate(
    const std::vector<bool>& parameters) {
  constexpr char kHow[] = "was stepped within backward, and is used before";
  {
    absl::MutexLock lock(&mutex_);
    const bool was_ready = ready_;
    if (pins_ > 0 || !blocked_.ok()) return false;
    SetStepped(kHow);
    if (pins_ > 0) {
      stepped_ = absl::OkStatus();
      ready_ = was_ready;
      return false;
    }
    storages_.Hide();
  }
  const absl::Status prepared = PrepareUpdate();
  if (!prepared.ok()) {
    Unblock();
    return prepared;
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i]) continue;
    torch::autograd::impl::bump_version(this->parameters()[i].tensor);
  }
  absl::MutexLock lock(&mutex_);
  SetStepped(kHow);  // again: what was arriving has been shown
  storages_.Hide();
  return true;
}

// What somebody holds stays shown: it is not stepped, and Step refuses it.
void FlatParameter::Block() {
  absl::MutexLock lock(&mutex_);
  if (!stepped_.ok() || life_ != Life::kOwned) return;
  SetStepped("is used between Backward and");
  if (pins_ == 0) storages_.Hide();
}

void FlatParameter::Unblock() {
  absl::MutexLock lock(&mutex_);
  if (stepped_.ok()) return;
  stepped_ = absl::OkStatus();
  if (life_ != Life::kOwned || traits_.can_be_freed || copy_->arriving() ||
      !copy_->whole().defined()) {
    return;  // its next pin shows it
  }
  storages_.Show(copy_->whole());
  ready_ = device().is_cpu();
}

absl::Status FlatParameter::Release() {
  TESSERA_RETURN_IF_ERROR(PrepareUpdate());
  TorchScope scope;
  {
    absl::MutexLock lock(&mutex_);
    if (life_ == Life::kOwned) {  // else they were given back already
      TESSERA_RETURN_IF_ERROR(AwaitArrival());
      FlatBuffer masters;  // where the parameters get their old dtype back
      const bool whole = copy_->whole().defined() && !storages_.converted();
      if (!whole) {
        TESSERA_ASSIGN_OR_RETURN(const RaisedValue value,
                                 states_->RaiseValue());
        TESSERA_ASSIGN_OR_RETURN(masters,
                                 GatherWhole(*this, value.View(), "masters"));
      }
      const at::Tensor values = whole ? copy_->whole().View() : masters.View();
      FlatStorages* const storages = &storages_;
      TESSERA_RETURN_IF_ERROR(
          CatchTorch("Close", [&] { storages->GiveBack(values); }));
      DropMemory(Life::kReleased);
    }
  }
  Forget(this);
  return absl::OkStatus();
}

void FlatParameter::DropMemory(Life life) {
  ready_ = false;
  (void)states_->AwaitUpdate();  // it may write to the memory yet
  uses_.Keep(copy_->whole().View());
  writes_.DropBefore();
  copy_->Drop();
  states_->Drop(ShardStates::kMasters);
  states_->Drop(ShardStates::kGradient);
  life_ = life;
}

void FlatParameter::Abandon() {
  {
    absl::MutexLock lock(&mutex_);
    if (life_ != Life::kOwned) return;
    // Nothing may write into our buffers any more.
    (void)AwaitArrival();
    storages_.Abandon();
    DropMemory(Life::kAbandoned);
  }
  Forget(this);
}

}  // namespace tessera
