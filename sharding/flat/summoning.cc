// A write through any pointer is seen by nobody. So a summoned flat counts as
// written from the start, and its values of before are kept unless they are
// somewhere already (a shard, memory that is shared). Ranks that do not hold it
// must not gather it meanwhile: the one that does would not take part.
#include "sharding/flat/summoning.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "sharding/flat/pins.h"

namespace tessera {

absl::Status Summoning::Begin() {
  TESSERA_RETURN_IF_ERROR(PinForUse(&flat_));
  absl::Status ready = Save();
  if (ready.ok()) ready = flat_.PrepareWrite();
  if (!ready.ok()) flat_.Unpin();
  flat_.summoned_ = ready.ok();
  return ready;
}

absl::Status Summoning::Save() {
  absl::MutexLock lock(&flat_.mutex_);
  return flat_.copy_->Save();
}

absl::Status Summoning::BeginElsewhere(int rank) {
  if (!flat_.gathers_together()) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(PinForUse(&flat_));
  flat_.Unpin();
  (void)flat_.TryFree();
  absl::MutexLock lock(&flat_.mutex_);
  flat_.blocked_ = absl::FailedPreconditionError(absl::StrCat(
      "[", flat_.name(), "] rank ", rank, " alone holds the unit whole, in an ",
      "Engine::Summon with rank0_only, and nobody can gather it meanwhile; ",
      "Close() that scope first"));
  return absl::OkStatus();
}

absl::Status Summoning::CheckAlone() {
  if (flat_.pins() == 1) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "[", flat_.name(), "] the unit is held by a tessera::Use, too (",
      flat_.pins(), " pins in all); end its scope before that of ",
      "Engine::Summon"));
}

absl::Status Summoning::PrepareReceive() {
  absl::MutexLock lock(&flat_.mutex_);
  TESSERA_RETURN_IF_ERROR(flat_.AwaitArrival());
  TESSERA_RETURN_IF_ERROR(flat_.CheckNotHeld());
  if (flat_.life_ != FlatParameter::Life::kOwned) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(flat_.copy_->PrepareReceive());
  TESSERA_RETURN_IF_ERROR(
      flat_.writes_.KeepBefore(flat_, *flat_.states_, flat_.copy_->whole()));
  flat_.storages_.Follow(flat_.copy_->whole());
  // As whatever is whole for a while and not pinned.
  if (flat_.can_be_freed()) flat_.storages_.Hide();
  return absl::OkStatus();
}

absl::Status Summoning::BroadcastWritten(int root) {
  TorchScope scope;
  absl::MutexLock lock(&flat_.mutex_);
  Communicator& group = *flat_.communicator();
  const at::Tensor whole = flat_.copy_->whole().Bytes();
  const CommTag tag{absl::StrCat("what was written into unit ", flat_.name())};
  flat_.uses_.OrderAfter();
  const int in_group = root % group.world_size();
  // To one rank of each shard group, and to the others of these.
  if (flat_.replicas() != nullptr && group.rank() == in_group) {
    TESSERA_RETURN_IF_ERROR(
        flat_.replicas()
            ->Broadcast(whole, root / group.world_size(), tag)
            .Wait());
  }
  TESSERA_RETURN_IF_ERROR(group.Broadcast(whole, in_group, tag).Wait());
  flat_.uses_.SetReady();
  flat_.writes_.ClearPlaced();  // all ranks have the same again
  flat_.writes_.SetDirty(true);
  flat_.blocked_ = absl::OkStatus();
  return absl::OkStatus();
}

void Summoning::DropReceived() {
  {
    absl::MutexLock lock(&flat_.mutex_);
    TakeBack();
    // It may hold anything.
    if (flat_.can_be_freed() && flat_.whole()) flat_.Free();
  }
  flat_.DropSecondary();
}

void Summoning::TakeBack() {
  if (flat_.life_ != FlatParameter::Life::kOwned) return;
  flat_.uses_.OrderAfter();
  flat_.copy_->Restore();
  flat_.writes_.DropBefore();
  flat_.writes_.ClearPlaced();
  if (!flat_.can_be_freed()) flat_.uses_.SetReady();
  flat_.storages_.Follow(flat_.copy_->whole());
  flat_.writes_.SetDirty(false);
}

void Summoning::End(bool keep_writes) {
  flat_.summoned_ = false;
  {
    absl::MutexLock lock(&flat_.mutex_);
    if (keep_writes) {
      flat_.copy_->DropSaved();
    } else {
      TakeBack();
    }
  }
  flat_.Unpin();
  if (keep_writes) return;
  (void)flat_.TryFree();
  flat_.DropSecondary();
}

void Summoning::EndElsewhere() {
  absl::MutexLock lock(&flat_.mutex_);
  flat_.blocked_ = absl::OkStatus();
}

}  // namespace tessera
