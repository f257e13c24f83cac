#include "sharding/recompute/outside_tensor.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "sharding/flat/registry.h"
#include "sharding/torch/version_error.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

int64_t VersionOf(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

}  // namespace

OutsideTensor::OutsideTensor(const at::Tensor& tensor)
    : cast_(SavedCast::Of(tensor)), version_(VersionOf(tensor)) {
  if (cast_ != nullptr) return;
  alias_ = at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      tensor.is_inference() ? c10::VariableVersion()
                            : torch::autograd::impl::version_counter(tensor),
      /*allow_tensor_metadata_change=*/true));
}

at::Tensor OutsideTensor::Value(const TensorPlace* place,
                                const std::string& reader, PinSet* pins) const {
  if (cast_ != nullptr) {
    cast_->CheckVersions();
    pins->Add(cast_->flat());
    const at::Tensor cast = cast_->Make();
    return place == nullptr ? cast : place->Over(cast.storage());
  }
  if (copied_) return place->Over(copy_);
  TORCH_CHECK(VersionOf(alias_) == version_,
              VersionError(alias_.toString(), alias_.sizes(), version_,
                           VersionOf(alias_)),
              " [", reader,
              "] It is read where activations are computed again; write to a "
              "clone() of it, or leave the module out of "
              "activation_checkpointing.units");
  return place == nullptr ? alias_ : place->Over(alias_.storage());
}

bool OutsideTensor::IsNow(const at::Tensor& tensor) const {
  return cast_ == nullptr && !copied_ && version_ == VersionOf(tensor);
}

void OutsideTensor::Copy() {
  if (cast_ != nullptr || copied_ || VersionOf(alias_) != version_) return;
  if (!alias_.has_storage() || Registry::Global().Find(alias_)) return;
  copy_ = CopyOf(alias_.storage());
  copied_ = true;
  alias_.reset();
}

std::shared_ptr<OutsideTensor> OutsideTensors::Of(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return std::make_shared<OutsideTensor>(tensor);
  const auto* const storage = tensor.storage().unsafeGetStorageImpl();
  auto it = by_storage_.find(storage);
  if (it != by_storage_.end()) {
    auto known = it->second.newest.lock();
    if (known != nullptr && known->IsNow(tensor)) return known;
  }
  if (by_storage_.size() >= prune_at_) {
    absl::erase_if(by_storage_,
                   [](const auto& e) { return e.second.newest.expired(); });
    prune_at_ = std::max(kPruneAt, 2 * by_storage_.size());
  }
  auto made = std::make_shared<OutsideTensor>(tensor);
  by_storage_.insert_or_assign(
      storage, Entry{tensor.storage().getWeakStorageImpl(), made});
  return made;
}

void OutsideTensors::BeforeWrite(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const auto it = by_storage_.find(tensor.storage().unsafeGetStorageImpl());
  if (it == by_storage_.end()) return;
  if (auto known = it->second.newest.lock()) known->Copy();
}

}  // namespace tessera
