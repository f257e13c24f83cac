#include "sharding/flat/flat_parameter.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/trace/trace.h"
#include "offload/update_stream.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {

namespace {

// Bytes that are held while the flat is whole. None where what is whole is the
// shard itself (sharding/copy/lone_copy.h).
int64_t GatheredBytes(const WorkingCopy& copy, const ShardStates& states) {
  if (!copy.traits().can_be_freed || !copy.whole().defined()) return 0;
  const FlatBuffer& shard = states.At(ShardStates::kWorking).memory();
  return shard.data() == copy.whole().data() ? 0 : copy.whole().bytes();
}

}  // namespace

// What was written must be kept before the whole copy goes, and the storages
// must lie nowhere before its memory does.
void FlatParameter::Free() {
  const TraceScope trace(TraceTrack::kFree, "free", name());
  if (writes_.TakeDirty()) {
    TorchScope scope;
    uses_.OrderAfter();
    states_->Order();
    writes_.TakeOver(*this, copy_->whole(), states_.get());
  }
  if (traits_.can_be_freed) {
    storages_.Unpoint();
    uses_.Use();  // a part of it may be kept
    uses_.Keep(copy_->whole().View());
  }
  copy_->Free();
  if (traits_.keeps_secondary) states_->SetChanged();
  storages_.Follow(copy_->whole());
  free_when_unpinned_ = false;
}

void FlatParameter::NotePlacedWrite(int slot, const std::string& op) {
  absl::MutexLock lock(&mutex_);
  if (life_ != Life::kOwned) return;
  writes_.NotePlaced(*this, copy_->whole(), slot, op);
}

std::string FlatParameter::TakePlacedWrites() {
  if (!writes_.has_placed()) return "";
  absl::MutexLock lock(&mutex_);
  const bool lies_there = life_ == Life::kOwned && copy_->whole().defined();
  if (lies_there) uses_.OrderAfter();
  return writes_.TakePlaced(*this, lies_there ? &copy_->whole() : nullptr);
}

absl::Status FlatParameter::Pin() {
  absl::MutexLock lock(&mutex_);
  if (life_ == Life::kAbandoned) {
    return absl::FailedPreconditionError(absl::StrCat(
        "[", name(), "] its tessera::Engine was destroyed without Close()"));
  }
  TESSERA_RETURN_IF_ERROR(blocked_);
  TESSERA_RETURN_IF_ERROR(stepped_);
  // kReleased: by a graph that outlived the engine.
  if (life_ == Life::kOwned) {
    TESSERA_RETURN_IF_ERROR(std::exchange(failed_, absl::OkStatus()));
    if (!copy_->whole().defined()) {
      TESSERA_RETURN_IF_ERROR(LaunchGather(/*ahead=*/false));
    }
    if (copy_->arriving()) {
      TESSERA_RETURN_IF_ERROR(AwaitArrival());
    } else if (traits_.can_be_freed && pins_ == 0) {
      storages_.Show(copy_->whole());
    }
    free_when_unpinned_ = false;
    uses_.Use();
  }
  ++pins_;
  return absl::OkStatus();
}

void FlatParameter::Unpin() {
  if (!traits_.can_be_freed) {
    --pins_;
    return;
  }
  absl::MutexLock lock(&mutex_);
  --pins_;
  if (pins_ > 0 || !copy_->whole().defined()) return;
  if ((free_when_unpinned_ || schedule_->free_after_use()) &&
      !copy_->MustStay(writes_.dirty())) {
    Free();
    return;
  }
  // Whether the flat happens to be whole must not decide what an access outside
  // of an operator does: a write would be lost without a word.
  storages_.Hide();
}

absl::Status FlatParameter::LaunchGather(bool ahead) {
  traced_ = {TraceRecords() ? TraceNow() : 0, ahead};
  states_->Order();  // what is gathered
  return copy_->StartGather();
}

void FlatParameter::TracedGather::End(const std::string& unit, int64_t bytes) {
  const int64_t from = std::exchange(begun, 0);
  if (from == 0 || bytes == 0) return;
  AddTraceSpan({TraceTrack::kGather, absl::StrCat("gather ", unit), from,
                TraceNow(), unit, bytes,
                ahead ? "\"ahead\":true" : "\"ahead\":false"});
}

// What is on its way has come, and is shown. An error leaves the storages
// without memory, or hidden for good.
absl::Status FlatParameter::AwaitArrival() {
  if (!copy_->arriving()) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(copy_->AwaitArrival());
  traced_.End(name(), GatheredBytes(*copy_, *states_));
  uses_.SetReady();
  storages_.Show(copy_->whole());
  ready_ = !traits_.can_be_freed && device().is_cpu();  // a pin only counts
  return absl::OkStatus();
}

void FlatParameter::StartGather(bool ahead) {
  absl::MutexLock lock(&mutex_);
  // The others do not gather it either; those that have yet to step it would
  // wait for one that has, and learn that ranks are in different collectives.
  if (!blocked_.ok() || !stepped_.ok()) return;
  // On a single rank this call itself makes the gather, and would wait for the
  // update, except where the shard comes from a disk.
  const bool from_disk = states_->At(ShardStates::kWorking).on_disk();
  if (!states_->updated().Done() && !from_disk &&
      communicator()->world_size() == 1) {
    return;
  }
  if (life_ == Life::kOwned && !copy_->whole().defined()) {
    failed_ = LaunchGather(ahead);
  }
}

bool FlatParameter::TryFree() {
  absl::MutexLock lock(&mutex_);
  if (!traits_.can_be_freed || !copy_->whole().defined()) return true;
  if (pins_ > 0 || copy_->MustStay(writes_.dirty())) return false;
  failed_.Update(AwaitArrival());
  if (copy_->whole().defined()) Free();
  return true;
}

void FlatParameter::FreeWhenUnpinned() {
  if (TryFree()) return;
  absl::MutexLock lock(&mutex_);
  free_when_unpinned_ = pins_ > 0;
}

void FlatParameter::DropSecondary() {
  if (!traits_.keeps_secondary) return;
  absl::MutexLock lock(&mutex_);
  copy_->DropSecondary();
}

absl::Status FlatParameter::PrepareWrite() {
  writes_.Prepare();
  if (!traits_.shared && (!splits_masters() || writes_.dirty())) {
    writes_.SetDirty(true);
    return absl::OkStatus();
  }
  absl::MutexLock lock(&mutex_);
  if (life_ != Life::kOwned) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(AwaitArrival());
  TESSERA_RETURN_IF_ERROR(copy_->PrepareWrite());
  TESSERA_RETURN_IF_ERROR(writes_.KeepBefore(*this, *states_, copy_->whole()));
  storages_.Follow(copy_->whole());
  writes_.SetDirty(true);
  return absl::OkStatus();
}

absl::Status FlatParameter::CheckNotHeld() const {
  const bool may_be_written = traits_.can_be_freed ? whole() : writes_.dirty();
  if (pins_ == 0 || !may_be_written) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "[", name(), "] the unit is held whole by a tessera::Use (", pins(),
      " pins); end its scope before Step, LoadCheckpoint or Close"));
}

absl::Status FlatParameter::PrepareUpdate() {
  absl::MutexLock lock(&mutex_);
  const absl::Status not_held = CheckNotHeld();
  TESSERA_RETURN_IF_ERROR(
      states_->AwaitUpdate());  // whatever comes of the rest
  TESSERA_RETURN_IF_ERROR(AwaitArrival());
  TESSERA_RETURN_IF_ERROR(not_held);
  uses_.OrderAfter();
  if (copy_->whole().defined()) Free();
  return writes_.TakeError();
}

absl::Status FlatParameter::PublishOwned(OwnedChange change) {
  const TraceScope trace(TraceTrack::kStep, "publish", name());
  TorchScope scope;
  absl::MutexLock lock(&mutex_);
  states_->SetUpdated(change.updated);
  if (!change.working_written && !change.updated.valid()) {
    TESSERA_RETURN_IF_ERROR(states_->RoundMasters());
  }
  states_->SetChanged();
  if (!traits_.can_be_freed) uses_.SetReady();
  copy_->Publish(std::move(change.updated));
  if (copy_->arriving() && !traits_.can_be_freed) {
    storages_.Hide();
    ready_ = false;  // the next pin takes the lock, and waits
  }
  if (!options().overlap) {
    TESSERA_RETURN_IF_ERROR(copy_->arriving() ? AwaitArrival()
                                              : states_->updated().Wait());
  }
  for (size_t i = 0; i < parameters().size(); ++i) {
    if (!change.parameters.empty() && !change.parameters[i]) continue;
    torch::autograd::impl::bump_version(parameters()[i].tensor);
  }
  return absl::OkStatus();
}

absl::Status FlatParameter::AwaitOthers(const CommFuture& written) {
  if (!traits_.shared) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  if (!copy_->Await(written)) return absl::OkStatus();
  storages_.Hide();
  ready_ = false;
  return options().overlap ? absl::OkStatus() : AwaitArrival();
}

int64_t FlatParameter::gathered_bytes() const {
  absl::MutexLock lock(&mutex_);
  return GatheredBytes(*copy_, *states_);
}

int64_t FlatParameter::resident_bytes() const {
  absl::MutexLock lock(&mutex_);
  const int64_t working =
      traits_.can_be_freed
          ? states_->At(ShardStates::kWorking).resident_bytes()
          : traits_.resident_numel *
                static_cast<int64_t>(c10::elementSize(dtype()));
  return working + states_->At(ShardStates::kMasters).resident_bytes();
}

}  // namespace tessera
