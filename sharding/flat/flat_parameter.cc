#include "sharding/flat/flat_parameter.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/trace/trace.h"
#include "offload/update_stream.h"

namespace tessera {

absl::StatusOr<TieredBuffer> FlatParameter::AllocateMasters() const {
  return TieredBuffer::Allocate(owned().numel(), master_dtype(), device(),
                                MemoryKind::kParameters,
                                options().PlaceOf(options().states),
                                absl::StrCat("masters of unit ", name()));
}

absl::Status FlatParameter::MakeMasters() {
  TorchScope scope;
  absl::MutexLock lock(&mutex_);
  if (!separate_masters() || master_.defined()) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(TieredBuffer made, AllocateMasters());
  {
    TESSERA_ASSIGN_OR_RETURN(Raised raised, Raised::Of(&made));
    TESSERA_ASSIGN_OR_RETURN(const Raised working,
                             Raised::Of(copy_->OwnedBuffer()));
    kept_.Order();
    made.View().copy_(copy_->Owned());
    kept_ = StreamPoint::Now(device());
    TESSERA_RETURN_IF_ERROR(raised.Commit());
  }
  master_ = std::move(made);
  return absl::OkStatus();
}

void FlatParameter::DropMasters() {
  absl::MutexLock lock(&mutex_);
  if (!trainable()) master_.Reset();
}

// What was written must be kept before the whole copy goes, and the storages
// must lie nowhere before its memory does.
void FlatParameter::Free() {
  const TraceScope trace(TraceTrack::kFree, "free", name());
  if (dirty_.exchange(false)) WriteBack();
  if (traits_.can_be_freed) {
    storages_.Unpoint();
    uses_.Use();  // a part of it may be kept
    uses_.Keep(copy_->whole().View());
  }
  copy_->Free();
  if (traits_.keeps_secondary) kept_ = StreamPoint::Now(device());
  storages_.Follow(copy_->whole());
  free_when_unpinned_ = false;
}

// What the user wrote into the working copy goes to its owner's part, and into
// the master where the working copy is no longer the master rounded: a master
// keeps the bits that the working copy cannot hold.
void FlatParameter::WriteBack() {
  TorchScope scope;
  uses_.OrderAfter();
  kept_.Order();
  written_to_ = true;
  const FlatBuffer& whole = copy_->whole();
  placed_writes_.Close(*this, whole);
  if (options().check_writes) {
    const at::Tensor bytes = whole.Bytes().cpu();
    written_ =
        written_ * 31 + Fingerprint(bytes.const_data_ptr(),
                                    static_cast<int64_t>(bytes.nbytes()));
  }
  not_written_.Update(WriteBackOwned(whole.View(owned())));
  kept_ = StreamPoint::Now(device());
}

absl::Status FlatParameter::WriteBackOwned(const at::Tensor& mine) {
  if (options().stream != nullptr) {
    TESSERA_RETURN_IF_ERROR(AwaitUpdate());
    TESSERA_RETURN_IF_ERROR(options().stream->Drain());  // early ones, too
    options().stream->BeforeWrite();
  }
  if (master_.defined()) TESSERA_RETURN_IF_ERROR(WriteBackToMasters(mine));
  TieredBuffer* const buffer = copy_->OwnedBuffer();
  if (buffer != nullptr && buffer->elsewhere()) {
    return buffer->CopyFrom({0, buffer->numel()}, mine);
  }
  const at::Tensor kept = copy_->Owned();
  if (kept.const_data_ptr() != mine.const_data_ptr()) kept.copy_(mine);
  return absl::OkStatus();
}

// Piece by piece, of masters that lie elsewhere, too: a write must not need
// memory for all of them.
absl::Status FlatParameter::WriteBackToMasters(const at::Tensor& mine) {
  constexpr int64_t kChunk = 1 << 20;
  const auto item = c10::elementSize(dtype());
  const at::ScalarType bits = item == 2   ? at::kShort
                              : item == 4 ? at::kInt
                                          : at::kLong;
  FlatBuffer raised;
  if (master_.elsewhere()) {
    TESSERA_ASSIGN_OR_RETURN(
        raised,
        FlatBuffer::Allocate(std::min(kChunk, owned().numel()), master_dtype(),
                             device(), MemoryKind::kWorking, Fill::kNone));
  }
  for (int64_t at = 0; at < owned().numel(); at += kChunk) {
    const int64_t n = std::min(kChunk, owned().numel() - at);
    const at::Tensor working = mine.narrow(0, at, n);
    at::Tensor master;
    if (master_.elsewhere()) {
      master = raised.View({0, n});
      TESSERA_RETURN_IF_ERROR(master_.CopyTo({at, at + n}, master));
    } else {
      master = master_.View().narrow(0, at, n);
    }
    const at::Tensor changed =
        master.to(dtype()).view(bits).ne(working.view(bits));
    master.copy_(at::where(changed, working.to(master_dtype()), master));
    if (!master_.elsewhere()) continue;
    TESSERA_RETURN_IF_ERROR(master_.CopyFrom({at, at + n}, master));
  }
  return absl::OkStatus();
}

// Of this flat: computed; of all on its disk: written. Early updates go on.
absl::Status FlatParameter::AwaitUpdate() {
  absl::Status status = updated_.Wait();
  if (options().stream != nullptr) {
    status.Update(options().stream->DrainKept());
  }
  if (!updated_.valid()) return status;
  kept_.Order();
  kept_ = StreamPoint::Now(device());  // another stream may be the next
  if (status.ok()) updated_ = CommFuture();
  return status;
}

uint64_t FlatParameter::TakeWritten() {
  absl::MutexLock lock(&mutex_);
  return std::exchange(written_, 0);
}

void FlatParameter::NotePlacedWrite(int slot, const std::string& op) {
  absl::MutexLock lock(&mutex_);
  if (life_ != Life::kOwned) return;
  placed_writes_.Note(*this, copy_->whole(), slot, op);
  has_placed_writes_ = true;
}

std::string FlatParameter::TakePlacedWrites() {
  if (!has_placed_writes_) return "";
  absl::MutexLock lock(&mutex_);
  has_placed_writes_ = false;
  if (life_ == Life::kOwned && copy_->whole().defined()) {
    uses_.OrderAfter();
    placed_writes_.Close(*this, copy_->whole());
  }
  return placed_writes_.Take(*this);
}

absl::Status FlatParameter::Pin() {
  absl::MutexLock lock(&mutex_);
  if (life_ == Life::kAbandoned) {
    return absl::FailedPreconditionError(absl::StrCat(
        "[", name(), "] its tessera::Engine was destroyed without Close()"));
  }
  TESSERA_RETURN_IF_ERROR(blocked_);
  // kReleased: by a graph that outlived the engine.
  if (life_ == Life::kOwned) {
    if (!copy_->whole().defined() || copy_->arriving() || !failed_.ok()) {
      TESSERA_RETURN_IF_ERROR(Gather());
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
      !copy_->MustStay(dirty_)) {
    Free();
    return;
  }
  // Whether the flat happens to be whole must not decide what an access outside
  // of an operator does: a write would be lost without a word.
  storages_.Hide();
}

absl::Status FlatParameter::Gather() {
  TESSERA_RETURN_IF_ERROR(std::exchange(failed_, absl::OkStatus()));
  if (!copy_->whole().defined()) {
    TESSERA_RETURN_IF_ERROR(LaunchGather(/*ahead=*/false));
  }
  return Settle();
}

absl::Status FlatParameter::LaunchGather(bool ahead) {
  gather_begun_ = TraceRecords() ? TraceNow() : 0;
  gathered_ahead_ = ahead;
  kept_.Order();  // what is gathered
  return copy_->StartGather();
}

// What is on its way has come, and is shown. An error leaves the storages
// without memory, or hidden for good.
absl::Status FlatParameter::Settle() {
  if (!copy_->arriving()) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(copy_->Settle());
  if (gather_begun_ != 0) TraceGather();
  uses_.SetReady();
  storages_.Show(copy_->whole());
  ready_ = counts_pins_only();
  return absl::OkStatus();
}

// From its start until its values are taken.
void FlatParameter::TraceGather() {
  const int64_t bytes = GatheredBytes();
  if (bytes > 0) {
    AddTraceSpan({TraceTrack::kGather, absl::StrCat("gather ", name()),
                  gather_begun_, TraceNow(), name(), bytes,
                  gathered_ahead_ ? "\"ahead\":true" : "\"ahead\":false"});
  }
  gather_begun_ = 0;
}

// The next pin takes the lock, and waits.
void FlatParameter::HideUntilSettled() {
  storages_.Hide();
  ready_ = false;
}

void FlatParameter::StartGather(bool ahead) {
  absl::MutexLock lock(&mutex_);
  if (!blocked_.ok()) return;  // the others do not gather it either
  // Alone, the gather is made by this call, which would wait for the update,
  // but for what comes from a disk.
  const TieredBuffer* const shard = copy_->OwnedBuffer();
  const bool from_disk = shard != nullptr && shard->on_disk();
  if (!updated_.Done() && !from_disk && communicator()->world_size() == 1) {
    return;
  }
  if (life_ == Life::kOwned && !copy_->whole().defined()) {
    failed_ = LaunchGather(ahead);
  }
}

bool FlatParameter::TryFree() {
  absl::MutexLock lock(&mutex_);
  if (!traits_.can_be_freed || !copy_->whole().defined()) return true;
  if (pins_ > 0 || copy_->MustStay(dirty_)) return false;
  failed_.Update(Settle());
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
  writes_prepared_.fetch_add(1, std::memory_order_relaxed);
  if (!traits_.shared) {
    dirty_.store(true, std::memory_order_relaxed);
    return absl::OkStatus();
  }
  absl::MutexLock lock(&mutex_);
  if (life_ != Life::kOwned) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(Settle());
  TESSERA_RETURN_IF_ERROR(copy_->PrepareWrite());
  storages_.Follow(copy_->whole());
  dirty_ = true;
  return absl::OkStatus();
}

absl::Status FlatParameter::CheckUpdatable() {
  absl::MutexLock lock(&mutex_);
  return CheckNotHeld();
}

// Who holds a Use may write at any time: the write would be lost.
absl::Status FlatParameter::CheckNotHeld() {
  const bool may_be_written =
      traits_.can_be_freed ? copy_->whole().defined() : dirty_.load();
  if (pins_ == 0 || !may_be_written) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "[", name(), "] the unit is held whole by a tessera::Use (", pins(),
      " pins); end its scope before Step, LoadCheckpoint or Close"));
}

absl::Status FlatParameter::PrepareUpdate() {
  absl::MutexLock lock(&mutex_);
  TESSERA_RETURN_IF_ERROR(AwaitUpdate());  // whatever comes of the rest
  TESSERA_RETURN_IF_ERROR(Settle());
  TESSERA_RETURN_IF_ERROR(CheckNotHeld());
  uses_.OrderAfter();
  kept_.Order();
  if (copy_->whole().defined()) Free();
  return std::exchange(not_written_, absl::OkStatus());
}

absl::Status FlatParameter::AwaitUpdated() {
  absl::MutexLock lock(&mutex_);
  absl::Status status = AwaitUpdate();
  if (options().stream != nullptr) status.Update(options().stream->Drain());
  return status;
}

absl::Status FlatParameter::PublishOwned(bool working_written,
                                         CommFuture updated) {
  TorchScope scope;
  absl::MutexLock lock(&mutex_);
  updated_ = updated;
  if (master_.defined() && !working_written && !updated.valid()) {
    TESSERA_ASSIGN_OR_RETURN(const Raised masters, Raised::Of(&master_));
    TESSERA_ASSIGN_OR_RETURN(Raised working, Raised::Of(copy_->OwnedBuffer()));
    copy_->Owned().copy_(master_.View());
    TESSERA_RETURN_IF_ERROR(working.Commit());
  }
  kept_ = StreamPoint::Now(device());
  if (!traits_.can_be_freed) uses_.SetReady();
  if (traits_.publishes) HideUntilSettled();
  copy_->Publish(std::move(updated));
  if (options().overlap) return absl::OkStatus();
  return traits_.publishes ? Settle() : updated_.Wait();
}

absl::Status FlatParameter::AwaitOthers(const CommFuture& written) {
  if (!traits_.shared) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  if (!copy_->Await(written)) return absl::OkStatus();
  HideUntilSettled();
  return options().overlap ? absl::OkStatus() : Settle();
}

CommFuture FlatParameter::updated() const {
  absl::MutexLock lock(&mutex_);
  return updated_;
}

at::Tensor FlatParameter::Masters() const {
  return master_.defined() ? master_.View() : copy_->Owned();
}

at::Tensor FlatParameter::masters() const {
  absl::MutexLock lock(&mutex_);
  kept_.Order();
  return Masters();
}

at::ScalarType FlatParameter::dtype_of_masters() const {
  return master_.defined() ? master_.dtype() : dtype();
}

TieredBuffer* FlatParameter::masters_buffer() {
  return master_.defined() ? &master_ : copy_->OwnedBuffer();
}

TieredBuffer* FlatParameter::separate_working_elsewhere() {
  TieredBuffer* const shard = copy_->OwnedBuffer();
  return master_.defined() && shard != nullptr && shard->elsewhere() ? shard
                                                                     : nullptr;
}

at::Tensor FlatParameter::separate_working() const {
  absl::MutexLock lock(&mutex_);
  return master_.defined() ? copy_->Owned() : at::Tensor();
}

int64_t FlatParameter::gathered_bytes() const {
  absl::MutexLock lock(&mutex_);
  return GatheredBytes();
}

// None where what is whole is the shard itself (sharding/copy/lone_copy.h).
int64_t FlatParameter::GatheredBytes() const {
  if (!traits_.can_be_freed || !copy_->whole().defined()) return 0;
  const TieredBuffer* const shard = copy_->OwnedBuffer();
  if (shard->memory().data() == copy_->whole().data()) return 0;
  return copy_->whole().bytes();
}

int64_t FlatParameter::resident_bytes() const {
  absl::MutexLock lock(&mutex_);
  const TieredBuffer* const shard = copy_->OwnedBuffer();
  const int64_t working =
      shard != nullptr ? shard->resident_bytes()
                       : traits_.resident_numel *
                             static_cast<int64_t>(c10::elementSize(dtype()));
  return working + master_.resident_bytes();
}

}  // namespace tessera
