#include "sharding/recompute/outside_tensor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/torch/storage_access.h"
#include "base/torch_guard.h"
#include "sharding/flat/registry.h"

namespace tessera {
namespace {

// Memory that is not its tensor's, or so small that it costs nothing to be
// sure.
bool MayChangeUnseen(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  if (IsHidden(storage.unsafeGetStorageImpl())) return false;  // no values here
  if (storage.nbytes() == 0 || Registry::Global().Find(tensor)) return false;
  const bool borrowed = storage.data_ptr().get_context() == nullptr;
  return borrowed || (tensor.device().is_cpu() &&
                      storage.nbytes() <= OutsideTensors::kCopiedBytes);
}

}  // namespace

OutsideTensor::OutsideTensor(const at::Tensor& tensor, OperatorWatch* outer)
    : cast_(SavedCast::Of(tensor)), version_(tensor) {
  if (cast_ != nullptr) return;
  alias_ = AliasOf(tensor);
  if (outer == nullptr || tensor.is_inference() ||
      Registry::Global().Find(alias_)) {
    return;
  }
  slot_ = outer->Save(tensor, alias_);
  if (slot_ != nullptr) alias_.reset();
}

at::Tensor OutsideTensor::Value(const TensorPlace* place,
                                absl::string_view reader, PinSet* pins) const {
  if (cast_ != nullptr) {
    cast_->CheckVersions();
    pins->Add(cast_->flat());
    const at::Tensor cast = cast_->Make();
    return place == nullptr ? cast : place->Over(cast.storage());
  }
  if (slot_ != nullptr) return slot_->Unpack();
  if (stored_ != nullptr) {
    auto memory = store_->Get(stored_);
    ThrowIfError(memory.status());
    return place->Over(*std::move(memory));
  }
  if (copied_) return place->Over(copy_);
  const auto by = [&] {
    return reader.empty()
               ? ""
               : absl::StrCat(" [", reader,
                              "] It is read when activations are recomputed; "
                              "write to a clone() of it, or leave the "
                              "module out of activation_checkpointing.units");
  };
  TORCH_CHECK(IsUnchanged(), version_.Error(alias_), by());
  return place == nullptr ? alias_ : place->Over(alias_.storage());
}

bool OutsideTensor::IsNow(const at::Tensor& tensor) const {
  if (cast_ != nullptr) return false;
  if (!copied_) return version_.saved() == SavedVersion(tensor).saved();
  if (stored_ != nullptr) return false;
  const c10::Storage& now = tensor.storage();
  return now.device().is_cpu() && now.nbytes() == copy_.nbytes() &&
         std::memcmp(now.data(), copy_.data(), now.nbytes()) == 0;
}

void OutsideTensor::Copy() {
  if (cast_ != nullptr || copied_) return;
  if (stored_ != nullptr) return store_->AwaitOut(stored_);
  if (!IsUnchanged()) return;
  if (!alias_.has_storage() || Registry::Global().Find(alias_)) return;
  if (IsHidden(alias_.storage().unsafeGetStorageImpl())) return;
  copy_ = CopyOf(alias_.storage());
  copied_ = true;
  alias_.reset();
}

void OutsideTensor::MoveTo(ActivationStore::Group* group,
                           const std::string& what) {
  if (cast_ != nullptr || stored_ != nullptr) return;
  if (!copied_ && (!IsPlain(alias_) || alias_.is_inference() ||
                   !IsUnchanged() || Registry::Global().Find(alias_))) {
    return;
  }
  const c10::Storage& from = copied_ ? copy_ : alias_.storage();
  const size_t used = copied_ ? from.nbytes() : alias_.nbytes();
  auto stored =
      group->Put(from, static_cast<int64_t>(used), version_.saved(), what);
  ThrowIfError(stored.status());
  if (*stored == nullptr) return;
  store_ = group->store();
  stored_ = *std::move(stored);
  alias_.reset();
  copy_ = c10::Storage();
}

void OutsideTensor::MoveBack(const at::Tensor& tensor) {
  if (stored_ == nullptr) return;
  alias_ = AliasOf(tensor);
  version_ = SavedVersion(tensor);
  stored_ = nullptr;
}

std::shared_ptr<OutsideTensor> OutsideTensors::Of(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return std::make_shared<OutsideTensor>(tensor);
  auto* held = by_storage_.Find(StorageOf(tensor));
  if (held != nullptr) {
    for (const auto& each : *held) {
      auto known = each.lock();
      if (known == nullptr || !known->IsNow(tensor)) continue;
      known->MoveBack(tensor);
      return known;
    }
  }
  auto made = std::make_shared<OutsideTensor>(tensor);
  if (MayChangeUnseen(tensor)) made->Copy();
  if (held == nullptr) {
    Prune();
    held = by_storage_.Add(tensor.storage(), {});
  }
  held->push_back(made);
  return made;
}

void OutsideTensors::Prune() {
  if (by_storage_.size() < prune_at_) return;
  by_storage_.EraseIf([](const auto& held) {
    return std::all_of(held.begin(), held.end(),
                       [](const auto& each) { return each.expired(); });
  });
  prune_at_ = std::max(kPruneAt, 2 * by_storage_.size());
}

void OutsideTensors::BeforeWrite(const at::Tensor& tensor) {
  const auto* const held = by_storage_.Find(StorageOf(tensor));
  if (held == nullptr) return;
  for (const auto& each : *held) {
    if (auto known = each.lock()) known->Copy();
  }
  by_storage_.Erase(StorageOf(tensor));
}

}  // namespace tessera
