#include "sharding/flat/flat_parameter.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "base/check.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "c10/core/StorageImpl.h"
#include "sharding/flat/schedule.h"
#include "sharding/torch/storage_access.h"
#include "sharding/torch/torch_scope.h"

namespace tessera {
namespace {

std::string FreedError(const std::string& parameter, const std::string& flat,
                       bool sharded) {
  return absl::StrCat(
      "[", flat, "] parameter '", parameter,
      sharded ? "' is sharded and freed between uses"
              : "' is being brought up to date after a step",
      ", and its memory was asked for outside of an operator (a raw data "
      "pointer, torch::save, or an alias that the engine does not know). Hold "
      "`auto pin = tessera::Use(w);` around the access.");
}

// Storages of `params` in order of first appearance.
std::vector<c10::intrusive_ptr<c10::StorageImpl>> DistinctStorages(
    const std::vector<NamedParameter>& params, std::vector<int>* slot_of) {
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages;
  absl::flat_hash_map<c10::StorageImpl*, int> slots;
  for (const auto& p : params) {
    c10::StorageImpl* impl = p.tensor.storage().unsafeGetStorageImpl();
    const auto [it, first] =
        slots.try_emplace(impl, static_cast<int>(storages.size()));
    slot_of->push_back(it->second);
    if (first) {
      storages.push_back(
          c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl));
    }
  }
  return storages;
}

}  // namespace

FlatLayout LayoutOf(const std::vector<NamedParameter>& parameters,
                    int world_size) {
  std::vector<int> slot_of;
  const auto storages = DistinctStorages(parameters, &slot_of);
  std::vector<int64_t> numel(storages.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto slot = static_cast<size_t>(slot_of[i]);
    const auto item =
        c10::elementSize(ElementType(parameters[i].tensor.scalar_type()));
    numel[slot] = static_cast<int64_t>(storages[slot]->nbytes() / item);
  }
  return FlatLayout(numel, world_size);
}

at::ScalarType WorkingDtypeOf(const std::vector<NamedParameter>& parameters,
                              const FlatParameterOptions& options) {
  return options.dtype.value_or(
      ElementType(parameters[0].tensor.scalar_type()));
}

absl::StatusOr<std::shared_ptr<FlatParameter>> FlatParameter::Prepare(
    std::string name, std::vector<NamedParameter> params,
    const FlatParameterOptions& options, std::shared_ptr<Communicator> comm,
    std::shared_ptr<Schedule> schedule) {
  TESSERA_CHECK(!params.empty()) << "unit " << name;
  auto flat = std::shared_ptr<FlatParameter>(new FlatParameter(options));
  flat->name_ = std::move(name);
  flat->comm_ = std::move(comm);
  flat->schedule_ = std::move(schedule);
  flat->LayOut(std::move(params));
  TESSERA_RETURN_IF_ERROR(flat->Allocate());
  return flat;
}

void FlatParameter::LayOut(std::vector<NamedParameter> params) {
  const at::ScalarType original = ElementType(params[0].tensor.scalar_type());
  dtype_ = WorkingDtypeOf(params, options_);
  master_dtype_ = at::isReducedFloatingType(original) ? at::kFloat : original;
  reduce_dtype_ = options_.reduce_dtype.value_or(dtype_);
  device_ = params[0].tensor.device();

  std::vector<int> slot_of;
  storages_ = DistinctStorages(params, &slot_of);
  original_dtypes_.resize(storages_.size());
  for (size_t i = 0; i < params.size(); ++i) {
    original_dtypes_[slot_of[i]] = params[i].tensor.scalar_type();
  }
  layout_ = LayoutOf(params, comm_->world_size());
  owned_ = options_.stage.sharded_optimizer ? layout_.shard(comm_->rank())
                                            : Range{0, layout_.whole_numel()};
  freed_errors_.resize(storages_.size());
  for (size_t i = 0; i < params.size(); ++i) {
    Parameter p;
    p.tensor = params[i].tensor;
    p.name = std::move(params[i].name);
    p.index = params[i].index;
    p.slot = slot_of[i];
    const int64_t per = ElementsPerNumber(p.tensor.scalar_type());
    p.storage_offset = p.tensor.storage_offset() * per;
    p.range.begin = layout_.slot(p.slot).begin + p.storage_offset;
    p.range.end = p.range.begin + p.tensor.numel() * per;
    if (freed_errors_[p.slot].empty()) {
      freed_errors_[p.slot] =
          FreedError(p.name, name_, options_.stage.sharded_parameters);
    }
    const Range mine = Intersect(p.range, owned_);
    if (!mine.empty()) segments_.push_back({static_cast<int>(i), mine});
    params_.push_back(std::move(p));
  }
}

absl::Status FlatParameter::Allocate() {
  TorchScope scope;
  const bool sharded = options_.stage.sharded_parameters;
  absl::MutexLock lock(&mutex_);
  if (shared()) {
    TESSERA_RETURN_IF_ERROR(AllocateShared());
  } else if (!sharded) {
    TESSERA_ASSIGN_OR_RETURN(
        FlatBuffer whole,
        FlatBuffer::Allocate(layout_.whole_numel(), dtype_, device_,
                             MemoryKind::kParameters));
    SetWhole(std::move(whole));
  }
  if (sharded) {
    TESSERA_ASSIGN_OR_RETURN(
        shard_, FlatBuffer::Allocate(layout_.shard_numel(), dtype_, device_,
                                     MemoryKind::kParameters));
  }
  if (!options_.trainable || !needs_masters()) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(
      master_, FlatBuffer::Allocate(owned_.numel(), master_dtype_, device_,
                                    MemoryKind::kParameters));
  return absl::OkStatus();
}

absl::Status FlatParameter::MakeMasters() {
  TorchScope scope;
  absl::MutexLock lock(&mutex_);
  if (!needs_masters() || master_.defined()) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(
      master_, FlatBuffer::Allocate(owned_.numel(), master_dtype_, device_,
                                    MemoryKind::kParameters));
  master_.View().copy_(OwnedWorking());
  return absl::OkStatus();
}

void FlatParameter::DropMasters() {
  absl::MutexLock lock(&mutex_);
  if (!options_.trainable) master_.Reset();
}

const FlatParameter::Parameter& FlatParameter::ParameterOfSlot(int slot) const {
  for (const auto& p : params_) {
    if (p.slot == slot) return p;
  }
  return params_[0];
}

void FlatParameter::PointAll() {
  for (size_t i = 0; i < storages_.size(); ++i) {
    PointStorage(storages_[i].get(),
                 whole_.data(layout_.slot(static_cast<int>(i)).begin), device_);
  }
}

void FlatParameter::HideAll() {
  for (const auto& storage : storages_) HideStorage(storage.get());
}

void FlatParameter::ShowAll() {
  for (const auto& storage : storages_) ShowStorage(storage.get());
}

void FlatParameter::SetWhole(FlatBuffer whole) {
  whole_ = std::move(whole);
  is_whole_ = whole_.defined();
}

void FlatParameter::Free() {
  if (dirty_.exchange(false)) WriteBack();
  KeepSecondary();
  // Adopt has told them what to say.
  for (const auto& storage : storages_) {
    UnpointStorageAgain(storage.get(), device_);
  }
  SetWhole({});
  schedule_->AddLive(-layout_.whole_numel());
  free_when_unpinned_ = false;
}

// What the user wrote into the working copy goes to its owner's shard, and into
// the master where the working copy is no longer the master rounded: a master
// keeps the bits that the working copy cannot hold.
void FlatParameter::WriteBack() {
  constexpr int64_t kChunk = 1 << 20;
  TorchScope scope;
  written_to_ = true;
  if (options_.check_writes) {
    const at::Tensor bytes = whole_.Bytes().cpu();
    written_ =
        written_ * 31 + Fingerprint(bytes.const_data_ptr(),
                                    static_cast<int64_t>(bytes.nbytes()));
  }
  const at::Tensor mine = whole_.View(owned_);
  const at::ScalarType bits =
      c10::elementSize(dtype_) == 2 ? at::kShort : at::kInt;
  for (int64_t at = 0; master_.defined() && at < owned_.numel(); at += kChunk) {
    const int64_t n = std::min(kChunk, owned_.numel() - at);
    const at::Tensor working = mine.narrow(0, at, n);
    const at::Tensor master = master_.View().narrow(0, at, n);
    const at::Tensor changed =
        master.to(dtype_).view(bits).ne(working.view(bits));
    master.copy_(at::where(changed, working.to(master_dtype_), master));
  }
  if (shard_.defined()) shard_.View().copy_(mine);
}

uint64_t FlatParameter::TakeWritten() {
  absl::MutexLock lock(&mutex_);
  return std::exchange(written_, 0);
}

absl::Status FlatParameter::Pin() {
  if (ready_) {
    ++pins_;
    return absl::OkStatus();
  }
  const bool sharded = options_.stage.sharded_parameters;
  if (sharded && !summoned_) schedule_->Touch(this);
  absl::MutexLock lock(&mutex_);
  if (life_ == Life::kAbandoned) {
    return absl::FailedPreconditionError(absl::StrCat(
        "[", name_, "] its tessera::Engine was destroyed without Close()"));
  }
  TESSERA_RETURN_IF_ERROR(blocked_);
  // kReleased: by a graph that outlived the engine.
  if (life_ == Life::kOwned) {
    if (!whole_.defined() || arriving_.has_value() || !failed_.ok()) {
      TESSERA_RETURN_IF_ERROR(Gather());
    } else if (sharded && pins_ == 0) {
      ShowAll();
    }
    free_when_unpinned_ = false;
  }
  ++pins_;
  return absl::OkStatus();
}

void FlatParameter::Unpin() {
  if (!options_.stage.sharded_parameters) {
    --pins_;
    return;
  }
  absl::MutexLock lock(&mutex_);
  --pins_;
  if (pins_ > 0 || !whole_.defined()) return;
  if ((free_when_unpinned_ || schedule_->free_after_use()) && !must_stay()) {
    Free();
    return;
  }
  // Whether the unit happens to be whole must not decide what an access outside
  // of an operator does: a write would be lost without a word.
  HideAll();
}

bool FlatParameter::TryFree() {
  absl::MutexLock lock(&mutex_);
  if (!options_.stage.sharded_parameters || !whole_.defined()) return true;
  if (pins_ > 0 || must_stay()) return false;
  failed_.Update(Settle());
  if (whole_.defined()) Free();
  return true;
}

void FlatParameter::FreeWhenUnpinned() {
  if (TryFree()) return;
  absl::MutexLock lock(&mutex_);
  free_when_unpinned_ = pins_ > 0;
}

absl::Status FlatParameter::CheckUpdatable() {
  absl::MutexLock lock(&mutex_);
  return CheckNotHeld();
}

// Who holds a Use may write at any time: the write would be lost.
absl::Status FlatParameter::CheckNotHeld() {
  const bool may_be_written =
      options_.stage.sharded_parameters ? whole_.defined() : dirty_.load();
  if (pins_ == 0 || !may_be_written) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "[", name_, "] the unit is held whole by a tessera::Use (", pins(),
      " pins); end its scope before Step, LoadCheckpoint or Close"));
}

absl::Status FlatParameter::PrepareUpdate() {
  absl::MutexLock lock(&mutex_);
  TESSERA_RETURN_IF_ERROR(Settle());
  TESSERA_RETURN_IF_ERROR(CheckNotHeld());
  if (!options_.stage.sharded_parameters) {
    if (dirty_.exchange(false)) WriteBack();
    if (private_) DropPrivate();
  } else if (whole_.defined()) {
    Free();
  }
  return absl::OkStatus();
}

absl::Status FlatParameter::PublishOwned(bool working_written) {
  TorchScope scope;
  absl::MutexLock lock(&mutex_);
  if (master_.defined() && !working_written) {
    OwnedWorking().copy_(master_.View());
  }
  if (shard_.defined() || !options_.stage.sharded_optimizer ||
      comm_->world_size() == 1) {
    return absl::OkStatus();
  }
  HideAll();
  ready_ = false;
  arriving_ = comm_->AllGather(
      whole_.Bytes(owned_), whole_.Bytes(),
      CommTag{absl::StrCat("all-gather after the step of unit ", name_)});
  return options_.overlap ? absl::OkStatus() : Settle();
}

at::Tensor FlatParameter::OwnedWorking() {
  return shard_.defined() ? shard_.View() : whole_.View(owned_);
}

at::Tensor FlatParameter::masters() {
  return master_.defined() ? master_.View() : OwnedWorking();
}

at::Tensor FlatParameter::separate_working() {
  return master_.defined() ? OwnedWorking() : at::Tensor();
}

int64_t FlatParameter::resident_bytes() const {
  const bool sharded = options_.stage.sharded_parameters || shared();
  const int64_t working =
      sharded ? layout_.shard_numel() : layout_.whole_numel();
  return working * static_cast<int64_t>(c10::elementSize(dtype_)) +
         master_.bytes();
}

void PinSet::Add(const std::shared_ptr<FlatParameter>& flat) {
  if (std::find(flats_.begin(), flats_.end(), flat) != flats_.end()) return;
  ThrowIfError(flat->Pin());
  flats_.push_back(flat);
}

void PinSet::Clear() {
  for (auto& flat : flats_) flat->Unpin();
  flats_.clear();
}

}  // namespace tessera
