// Units that Engine::Summon holds whole: writes through any pointer, which may
// be taken back.
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/flat/schedule.h"
#include "sharding/torch/torch_scope.h"

namespace tessera {

absl::Status FlatParameter::BeginSummon() {
  TESSERA_RETURN_IF_ERROR(Pin());
  const absl::Status ready = PrepareSummoned();
  if (!ready.ok()) Unpin();
  summoned_ = ready.ok();
  return ready;
}

// What is freed, or a copy that is not shared, is taken back by dropping it;
// anything else needs its values kept.
absl::Status FlatParameter::PrepareSummoned() {
  if (!options_.stage.sharded_parameters && !shared()) {
    absl::MutexLock lock(&mutex_);
    TESSERA_ASSIGN_OR_RETURN(
        saved_, FlatBuffer::Allocate(layout_.whole_numel(), dtype_, device_,
                                     MemoryKind::kWorking, Fill::kNone));
    CopyBytes(device_, saved_.data(), whole_.data(), saved_.bytes());
  }
  return PrepareWrite();
}

absl::Status FlatParameter::SummonElsewhere(int rank) {
  if (!gathers_together()) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(Pin());
  Unpin();
  (void)TryFree();
  absl::MutexLock lock(&mutex_);
  blocked_ = absl::FailedPreconditionError(absl::StrCat(
      "[", name_, "] rank ", rank, " alone holds the unit whole, in an ",
      "Engine::Summon with rank0_only, and nobody can gather it meanwhile; ",
      "Close() that scope before"));
  return absl::OkStatus();
}

absl::Status FlatParameter::CheckSummonedOnly() {
  absl::MutexLock lock(&mutex_);
  if (pins_ == 1) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "[", name_, "] the unit is held by a tessera::Use, too (", pins(),
      " pins in all); end its scope before that of Engine::Summon"));
}

absl::Status FlatParameter::PrepareReceive() {
  {
    absl::MutexLock lock(&mutex_);
    TESSERA_RETURN_IF_ERROR(Settle());
    TESSERA_RETURN_IF_ERROR(CheckNotHeld());
    if (options_.stage.sharded_parameters && !whole_.defined()) {
      TorchScope scope;
      TESSERA_RETURN_IF_ERROR(AllocateWhole());
      schedule_->AddLive(layout_.whole_numel());
      PointAll();
      HideAll();  // as whatever is whole and not pinned
    }
  }
  return shared() ? PrepareWrite() : absl::OkStatus();
}

absl::Status FlatParameter::BroadcastWritten(int root) {
  TorchScope scope;
  absl::MutexLock lock(&mutex_);
  const CommTag tag{absl::StrCat("what was written into unit ", name_)};
  const int in_group = root % comm_->world_size();
  // To one rank of each shard group, and to the others of these.
  if (options_.replicas != nullptr && comm_->rank() == in_group) {
    TESSERA_RETURN_IF_ERROR(
        options_.replicas
            ->Broadcast(whole_.Bytes(), root / comm_->world_size(), tag)
            .Wait());
  }
  TESSERA_RETURN_IF_ERROR(
      comm_->Broadcast(whole_.Bytes(), in_group, tag).Wait());
  dirty_ = true;
  blocked_ = absl::OkStatus();
  return absl::OkStatus();
}

void FlatParameter::DropReceived() {
  {
    absl::MutexLock lock(&mutex_);
    TakeBack();
    // It may hold anything.
    if (options_.stage.sharded_parameters && whole_.defined()) Free();
  }
  DropSecondary();
}

// REQUIRES: nothing was written before the summoning.
void FlatParameter::TakeBack() {
  if (life_ == Life::kOwned) {
    if (saved_.defined()) {
      CopyBytes(device_, whole_.data(), saved_.data(), saved_.bytes());
    }
    if (private_) DropPrivate();
    dirty_ = false;
  }
  saved_.Reset();
}

void FlatParameter::EndSummon(bool keep_writes) {
  summoned_ = false;
  {
    absl::MutexLock lock(&mutex_);
    if (keep_writes) {
      saved_.Reset();
    } else {
      TakeBack();
    }
  }
  Unpin();
  if (keep_writes) return;
  (void)TryFree();
  DropSecondary();
}

void FlatParameter::EndSummonElsewhere() {
  absl::MutexLock lock(&mutex_);
  blocked_ = absl::OkStatus();
}

}  // namespace tessera
