#include "sharding/unit.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "c10/core/StorageImpl.h"
#include "sharding/residency.h"
#include "sharding/storage_access.h"
#include "sharding/torch_scope.h"

namespace tessera {
namespace {

std::string FreedError(const std::string& parameter, const std::string& unit) {
  return absl::StrCat(
      "[", unit, "] parameter '", parameter,
      "' is sharded and freed between uses, and its memory was asked for "
      "outside of an operator (a raw data pointer, torch::save, or an alias "
      "that the engine does not know). Hold `auto pin = tessera::Use(w);` "
      "around the access.");
}

// Storages of `params` in order of first appearance.
std::vector<c10::intrusive_ptr<c10::StorageImpl>> DistinctStorages(
    const std::vector<NamedParameter>& params, std::vector<int>* slot_of) {
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages;
  for (const auto& p : params) {
    c10::StorageImpl* impl = p.tensor.storage().unsafeGetStorageImpl();
    auto it = std::find_if(storages.begin(), storages.end(),
                           [&](const auto& s) { return s.get() == impl; });
    slot_of->push_back(static_cast<int>(it - storages.begin()));
    if (it == storages.end()) {
      storages.push_back(
          c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl));
    }
  }
  return storages;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Unit>> Unit::Prepare(
    std::string name, std::vector<NamedParameter> params, int first_index,
    Stage stage, std::shared_ptr<Communicator> comm,
    std::shared_ptr<Residency> residency) {
  TESSERA_CHECK(!params.empty()) << "unit " << name;
  auto unit = std::shared_ptr<Unit>(new Unit());
  Unit& u = *unit;
  u.name_ = std::move(name);
  u.stage_ = stage;
  u.comm_ = std::move(comm);
  u.residency_ = std::move(residency);
  u.dtype_ = params[0].tensor.scalar_type();
  u.item_bytes_ = static_cast<int64_t>(c10::elementSize(u.dtype_));
  u.device_ = params[0].tensor.device();

  std::vector<int> slot_of;
  u.storages_ = DistinctStorages(params, &slot_of);
  std::vector<int64_t> slot_bytes;
  for (const auto& s : u.storages_) {
    slot_bytes.push_back(static_cast<int64_t>(s->nbytes()));
  }
  u.layout_ = FlatLayout(slot_bytes, u.comm_->world_size());
  u.owned_ = stage.sharded_optimizer ? u.layout_.shard(u.comm_->rank())
                                     : ByteRange{0, u.layout_.whole_bytes()};
  u.freed_errors_.resize(u.storages_.size());
  for (size_t i = 0; i < params.size(); ++i) {
    Parameter p;
    p.tensor = params[i].tensor;
    p.name = std::move(params[i].name);
    p.index = first_index + static_cast<int>(i);
    p.slot = slot_of[i];
    p.flat.begin = u.layout_.slot(p.slot).begin +
                   p.tensor.storage_offset() * u.item_bytes_;
    p.flat.end = p.flat.begin + p.tensor.numel() * u.item_bytes_;
    if (u.freed_errors_[p.slot].empty()) {
      u.freed_errors_[p.slot] = FreedError(p.name, u.name_);
    }
    const ByteRange mine = Intersect(p.flat, u.owned_);
    if (!mine.empty()) u.segments_.push_back({static_cast<int>(i), mine});
    u.params_.push_back(std::move(p));
  }

  TorchScope scope;
  absl::MutexLock lock(&u.mutex_);
  TESSERA_ASSIGN_OR_RETURN(
      u.whole_,
      FlatBuffer::Allocate(u.layout_.whole_bytes(), u.device_,
                           stage.sharded_parameters ? MemoryKind::kWorking
                                                    : MemoryKind::kParameters));
  if (stage.sharded_parameters) {
    TESSERA_ASSIGN_OR_RETURN(
        u.shard_, FlatBuffer::Allocate(u.layout_.shard_bytes(), u.device_,
                                       MemoryKind::kParameters));
  }
  return unit;
}

void Unit::Adopt() {
  TorchScope scope;
  absl::MutexLock lock(&mutex_);
  life_ = Life::kOwned;
  for (size_t i = 0; i < storages_.size(); ++i) {
    CopyBytes(device_, whole_.data() + layout_.slot(i).begin,
              static_cast<const char*>(storages_[i]->data()),
              layout_.slot(i).bytes());
    storages_[i]->set_resizable(false);
  }
  PointAll();
  for (const auto& p : params_) AddTag(p.tensor);
  if (stage_.sharded_parameters) {
    dirty_ = true;  // so that Free copies the slice into the shard
    Free();
  }
}

void Unit::Abandon() {
  absl::MutexLock lock(&mutex_);
  if (life_ != Life::kOwned) return;
  life_ = Life::kAbandoned;
  residency_->Forget(this);
  for (size_t i = 0; i < storages_.size(); ++i) {
    UnpointStorage(storages_[i].get(),
                   absl::StrCat("parameter '", ParameterOfSlot(i).name,
                                "': its tessera::Engine was destroyed without "
                                "Close(), which gives the parameters back"),
                   device_);
  }
  whole_.Reset();
  shard_.Reset();
}

const Unit::Parameter& Unit::ParameterOfSlot(int slot) const {
  for (const auto& p : params_) {
    if (p.slot == slot) return p;
  }
  return params_[0];
}

void Unit::PointAll() {
  for (size_t i = 0; i < storages_.size(); ++i) {
    PointStorage(storages_[i].get(), whole_.data() + layout_.slot(i).begin,
                 device_);
  }
}

absl::Status Unit::Gather() {
  TorchScope scope;
  auto whole = FlatBuffer::Allocate(layout_.whole_bytes(), device_,
                                    MemoryKind::kWorking);
  if (!whole.ok()) {
    comm_->Announce(whole.status());  // the others wait for our part
    return whole.status();
  }
  TESSERA_RETURN_IF_ERROR(
      comm_
          ->AllGather(shard_.View(dtype_), whole->View(dtype_),
                      CommTag{absl::StrCat("all-gather of unit ", name_)})
          .Wait());
  whole_ = *std::move(whole);
  PointAll();
  return absl::OkStatus();
}

void Unit::Free() {
  if (dirty_.exchange(false)) {
    CopyBytes(device_, shard_.data(), whole_.data() + owned_.begin,
              owned_.bytes());
  }
  for (size_t i = 0; i < storages_.size(); ++i) {
    UnpointStorage(storages_[i].get(), freed_errors_[i], device_);
  }
  whole_.Reset();
}

absl::Status Unit::Pin() {
  {
    absl::MutexLock lock(&mutex_);
    if (life_ == Life::kReleased) {  // by a graph that outlived the engine
      ++pins_;
      return absl::OkStatus();
    }
  }
  residency_->WillUse(this);
  absl::MutexLock lock(&mutex_);
  if (life_ == Life::kAbandoned) {
    return absl::FailedPreconditionError(absl::StrCat(
        "[", name_, "] its tessera::Engine was destroyed without Close()"));
  }
  if (life_ == Life::kOwned && !whole_.defined()) {
    TESSERA_RETURN_IF_ERROR(Gather());
  } else if (pins_ == 0 && stage_.sharded_parameters && whole_.defined()) {
    for (const auto& storage : storages_) ShowStorage(storage.get());
  }
  ++pins_;
  return absl::OkStatus();
}

void Unit::Unpin() {
  absl::MutexLock lock(&mutex_);
  --pins_;
  if (pins_ > 0 || !stage_.sharded_parameters || !whole_.defined()) return;
  if (residency_->free_after_use()) {
    Free();
    return;
  }
  // Whether the unit happens to be whole must not decide what an access outside
  // of an operator does: a write would be lost without a word.
  for (const auto& storage : storages_) HideStorage(storage.get());
}

bool Unit::TryFree() {
  absl::MutexLock lock(&mutex_);
  if (!stage_.sharded_parameters || !whole_.defined()) return true;
  if (pins_ > 0) return false;
  Free();
  return true;
}

absl::Status Unit::CheckUpdatable() {
  if (!stage_.sharded_parameters) return absl::OkStatus();
  TryFree();
  absl::MutexLock lock(&mutex_);
  if (!whole_.defined()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "[", name_, "] the unit is held whole by a tessera::Use (", pins_,
      " pins); end its scope before Step, LoadCheckpoint or Close"));
}

absl::Status Unit::PublishOwned() {
  if (stage_.sharded_parameters || !stage_.sharded_optimizer) {
    return absl::OkStatus();
  }
  return comm_
      ->AllGather(
          whole_.View(dtype_, owned_), whole_.View(dtype_),
          CommTag{absl::StrCat("all-gather after the step of unit ", name_)})
      .Wait();
}

absl::Status Unit::Release() {
  TESSERA_RETURN_IF_ERROR(CheckUpdatable());
  TorchScope scope;
  absl::MutexLock lock(&mutex_);
  if (!whole_.defined()) TESSERA_RETURN_IF_ERROR(Gather());
  TESSERA_RETURN_IF_ERROR(CatchTorch("Close", [&] {
    for (size_t i = 0; i < storages_.size(); ++i) {
      c10::StorageImpl* storage = storages_[i].get();
      at::Allocator* allocator = c10::GetAllocator(device_.type());
      auto memory = allocator->allocate(storage->nbytes());
      CopyBytes(device_, static_cast<char*>(memory.get()),
                whole_.data() + layout_.slot(i).begin, layout_.slot(i).bytes());
      ShowStorage(storage);
      storage->set_data_ptr_noswap(std::move(memory));
      storage->set_allocator(allocator);
      storage->set_resizable(true);
    }
    for (const auto& p : params_) RemoveTag(p.tensor);
    whole_.Reset();
    shard_.Reset();
  }));
  life_ = Life::kReleased;
  residency_->Forget(this);
  return absl::OkStatus();
}

char* Unit::owned_data() {
  return stage_.sharded_parameters ? shard_.data()
                                   : whole_.data() + owned_.begin;
}

int64_t Unit::resident_bytes() const {
  return stage_.sharded_parameters ? layout_.shard_bytes()
                                   : layout_.whole_bytes();
}

bool Unit::whole() {
  absl::MutexLock lock(&mutex_);
  return whole_.defined();
}

int Unit::pins() {
  absl::MutexLock lock(&mutex_);
  return pins_;
}

void PinSet::Add(const std::shared_ptr<Unit>& unit) {
  if (std::find(units_.begin(), units_.end(), unit) != units_.end()) return;
  ThrowIfError(unit->Pin());
  units_.push_back(unit);
}

void PinSet::Clear() {
  for (auto& unit : units_) unit->Unpin();
  units_.clear();
}

}  // namespace tessera
