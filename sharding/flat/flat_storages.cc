#include "sharding/flat/flat_storages.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/stream/stream_uses.h"
#include "base/torch/storage_access.h"
#include "base/torch_guard.h"
#include "c10/core/DeviceGuard.h"
#include "c10/core/StorageImpl.h"
#include "sharding/construct/construction.h"

namespace tessera {

FlatStorages::FlatStorages(const FlatDescription* flat) : flat_(*flat) {
  for (const auto& p : flat_.parameters()) {
    if (static_cast<size_t>(p.slot) == storages_.size()) {
      storages_.push_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
          p.tensor.storage().unsafeGetStorageImpl()));
      original_dtypes_.emplace_back();
    }
    original_dtypes_[static_cast<size_t>(p.slot)] = p.tensor.scalar_type();
  }
}

// Storage by storage, each one's memory dropped before the next is gathered: so
// a flat under construction is never whole.
absl::Status FlatStorages::TakeOver(
    const std::function<void(int slot, const at::Tensor& values)>& take,
    const std::function<std::string(const std::string& parameter)>& error_of) {
  for (size_t i = 0; i < storages_.size(); ++i) {
    TESSERA_RETURN_IF_ERROR(TakeValues(static_cast<int>(i), take));
    KeepForCurrentStream(flat_.ParameterOfSlot(static_cast<int>(i)).tensor);
    storages_[i]->set_data_ptr_noswap(c10::DataPtr(nullptr, flat_.device()));
  }
  const auto& dtype = flat_.options().dtype;
  if (dtype.has_value() && *dtype != ElementType(original_dtypes_[0])) {
    Convert();
  }
  for (size_t i = 0; i < storages_.size(); ++i) {
    storages_[i]->set_resizable(false);
    UnpointStorage(storages_[i].get(),
                   error_of(flat_.ParameterOfSlot(static_cast<int>(i)).name),
                   flat_.device());
  }
  return absl::OkStatus();
}

absl::Status FlatStorages::TakeValues(
    int slot,
    const std::function<void(int slot, const at::Tensor& values)>& take) {
  const auto i = static_cast<size_t>(slot);
  EvictablePins pins;
  TESSERA_RETURN_IF_ERROR(CatchTorch(
      "Engine::Create", [&] { pins.Add(flat_.ParameterOfSlot(slot).tensor); }));
  const void* const data = storages_[i]->data();
  take(slot, TensorOver(static_cast<char*>(const_cast<void*>(data)),
                        {flat_.layout().slot(slot).numel()}, {1},
                        ElementType(original_dtypes_[i]), flat_.device()));
  return absl::OkStatus();
}

// Gives the parameters storages of the working dtype.
void FlatStorages::Convert() {
  const at::ScalarType dtype = flat_.dtype();
  originals_ = std::move(storages_);
  storages_.clear();
  for (size_t i = 0; i < originals_.size(); ++i) {
    const int slot = static_cast<int>(i);
    const auto bytes = static_cast<size_t>(flat_.layout().slot(slot).numel() *
                                           c10::elementSize(dtype));
    storages_.push_back(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), bytes,
        c10::DataPtr(nullptr, flat_.device()), /*allocator=*/nullptr,
        /*resizable=*/false));
    originals_[i]->set_resizable(false);
    UnpointStorage(
        originals_[i].get(),
        absl::StrCat("[", flat_.name(), "] parameter '",
                     flat_.ParameterOfSlot(slot).name, "' was converted to ",
                     c10::toString(dtype),
                     " by Engine::Create, and an alias taken before holds its "
                     "old memory; take aliases afterwards"),
        flat_.device());
  }
  for (const auto& p : flat_.parameters()) {
    SetStorage(p.tensor, storages_[static_cast<size_t>(p.slot)], dtype);
  }
}

void FlatStorages::Follow(const FlatBuffer& whole) {
  if (!whole.defined()) return Unpoint();
  if (std::exchange(at_, whole.data()) == whole.data()) return;
  for (size_t i = 0; i < storages_.size(); ++i) {
    const Range slot = flat_.layout().slot(static_cast<int>(i));
    PointStorage(storages_[i].get(), whole.data(slot.begin), flat_.device());
  }
}

void FlatStorages::Unpoint() {
  if (std::exchange(at_, nullptr) == nullptr) return;
  // TakeOver has told them what to say.
  for (const auto& storage : storages_) {
    UnpointStorageAgain(storage.get(), flat_.device());
  }
}

void FlatStorages::Show(const FlatBuffer& whole) {
  if (whole.data() != at_) return Follow(whole);
  for (const auto& storage : storages_) ShowStorage(storage.get());
}

void FlatStorages::Hide() {
  for (const auto& storage : storages_) HideStorage(storage.get());
}

void FlatStorages::GiveBack(const at::Tensor& values) {
  const c10::OptionalDeviceGuard guard(flat_.device());  // for the allocator
  at::Allocator* allocator = c10::GetAllocator(flat_.device().type());
  for (size_t i = 0; i < storages_.size(); ++i) {
    const auto& storage = converted() ? originals_[i] : storages_[i];
    const Range slot = flat_.layout().slot(static_cast<int>(i));
    c10::DataPtr memory = allocator->allocate(storage->nbytes());
    TensorOver(static_cast<char*>(memory.get()), {slot.numel()}, {1},
               ElementType(original_dtypes_[i]), flat_.device())
        .copy_(values.narrow(0, slot.begin, slot.numel()));
    ShowStorage(storage.get());
    storage->set_data_ptr_noswap(std::move(memory));
    storage->set_allocator(allocator);
    storage->set_resizable(true);
  }
  for (const auto& p : flat_.parameters()) {
    const auto slot = static_cast<size_t>(p.slot);
    if (converted()) {
      SetStorage(p.tensor, originals_[slot], original_dtypes_[slot]);
      UnpointStorage(storages_[slot].get(),
                     absl::StrCat("parameter '", p.name,
                                  "': its tessera::Engine was closed"),
                     flat_.device());
    }
    RemoveTag(p.tensor);
  }
}

void FlatStorages::Abandon() {
  for (size_t i = 0; i < storages_.size(); ++i) {
    UnpointStorage(storages_[i].get(),
                   absl::StrCat("parameter '",
                                flat_.ParameterOfSlot(static_cast<int>(i)).name,
                                "': its tessera::Engine was destroyed "
                                "without Close(), which gives the "
                                "parameters back"),
                   flat_.device());
  }
}

}  // namespace tessera
