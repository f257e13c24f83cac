#include "sharding/dispatch/saved_casts.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

#include "ATen/core/LegacyTypeDispatch.h"
#include "ATen/core/grad_mode.h"
#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "base/torch/placed_tensor.h"
#include "base/torch/saved_version.h"
#include "base/torch/torch_scope.h"
#include "c10/core/StorageImpl.h"
#include "sharding/flat/registry.h"

namespace tessera {
namespace {

// What is remembered of a cast: all but the memory.
struct Cast {
  Cast(const StorageOwner& owned, const at::Tensor& source,
       const at::Tensor& cast)
      : storage(cast.storage().getWeakStorageImpl()),
        version(cast),
        place(cast),
        source_storage(source.storage().getWeakStorageImpl()),
        source_place(source),
        source_version(source),
        parameter_version(owned.flat->ParameterOfSlot(owned.slot).tensor) {}

  bool changed() const {
    return version.changed() || source_version.changed() ||
           parameter_version.changed();
  }

  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  SavedVersion version;
  TensorPlace place;
  c10::weak_intrusive_ptr<c10::StorageImpl> source_storage;
  TensorPlace source_place;
  // Two, since the source may be a .data(), which has a counter of its own.
  SavedVersion source_version, parameter_version;
};

// The casts of the process that are alive, by their storage; some that are not,
// whose addresses the weak references keep from being used again.
class Casts {
 public:
  static Casts& Global() {
    static Casts* casts = new Casts();
    return *casts;
  }

  void Add(std::shared_ptr<const Cast> cast) {
    const void* key = cast->storage._unsafe_get_target();
    absl::MutexLock lock(&mutex_);
    if (casts_.size() >= prune_at_) {
      absl::erase_if(casts_,
                     [](const auto& e) { return e.second->storage.expired(); });
      prune_at_ = std::max(kPruneAt, 2 * casts_.size());
    }
    casts_[key] = std::move(cast);
    empty_ = false;
  }

  std::shared_ptr<const Cast> Find(const at::Tensor& tensor) const {
    if (empty_.load(std::memory_order_relaxed) || !tensor.has_storage()) {
      return nullptr;
    }
    absl::ReaderMutexLock lock(&mutex_);
    auto it = casts_.find(tensor.storage().unsafeGetStorageImpl());
    return it == casts_.end() ? nullptr : it->second;
  }

 private:
  static constexpr size_t kPruneAt = 64;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<const void*, std::shared_ptr<const Cast>> casts_
      ABSL_GUARDED_BY(mutex_);
  size_t prune_at_ ABSL_GUARDED_BY(mutex_) = kPruneAt;
  std::atomic<bool> empty_{true};
};

class SavedCastImpl final : public SavedCast {
 public:
  SavedCastImpl(std::shared_ptr<const Cast> cast, StorageOwner owned,
                at::Tensor source, const at::Tensor& saved)
      : cast_(std::move(cast)),
        owned_(std::move(owned)),
        source_(std::move(source)),
        place_(saved),
        version_(saved) {}

  const std::shared_ptr<FlatParameter>& flat() const override {
    return owned_.flat;
  }

  void CheckVersions() const override {
    const auto options = source_.options().dtype(place_.dtype);
    TORCH_CHECK(
        !version_.changed(),
        version_.Error(at::empty({0}, options).toString(), place_.sizes));
    const SavedVersion& source = cast_->source_version.changed()
                                     ? cast_->source_version
                                     : cast_->parameter_version;
    TORCH_CHECK(
        !source.changed(), source.Error(source_), " [", owned_.flat->name(),
        "] It is parameter '", owned_.parameter(), "', which was cast to ",
        cast_->place.dtype.name(),
        " (by autocast or .to()). Backward casts it again instead of keeping "
        "the cast; to keep the values of before, save a clone() of the cast.");
  }

  at::Tensor Make() const override {
    const bool makes_graph = at::GradMode::is_enabled();
    at::Tensor cast, view;
    {
      TorchScope scope;
      at::AutoDispatchBelowADInplaceOrView no_view_metadata;
      cast = at::empty_strided(cast_->place.sizes, cast_->place.strides,
                               source_.options().dtype(cast_->place.dtype));
      cast.copy_(source_);
      view = cast.as_strided(place_.sizes, place_.strides, place_.offset);
    }
    // For a backward of the graph that this backward makes.
    if (makes_graph) RememberCast(source_, cast);
    return view;
  }

 private:
  const std::shared_ptr<const Cast> cast_;
  const StorageOwner owned_;
  const at::Tensor source_;  // alias, without history
  const TensorPlace place_;  // of what was saved: a view of the cast
  const SavedVersion version_;
};

}  // namespace

void RememberCast(const at::Tensor& source, const at::Tensor& cast) {
  const bool is_cast = cast.dtype() != source.dtype() &&
                       cast.device() == source.device() &&
                       cast.layout() == at::kStrided;
  // Inference tensors have no versions, and are never saved.
  if (!is_cast || cast.is_inference() || source.is_inference()) return;
  const StorageOwner owned = Registry::Global().Find(source);
  if (!owned) return;
  Casts::Global().Add(std::make_shared<const Cast>(owned, source, cast));
}

std::unique_ptr<SavedCast> SavedCast::Of(const at::Tensor& tensor) {
  auto cast = Casts::Global().Find(tensor);
  if (cast == nullptr || cast->changed()) return nullptr;
  const bool is_view = tensor.dtype() == cast->place.dtype &&
                       tensor._version() == cast->version.saved() &&
                       !tensor.is_conj() && !tensor.is_neg();
  if (!is_view) return nullptr;
  auto storage = cast->source_storage.lock();
  const StorageOwner owned = Registry::Global().Find(storage.get());
  if (!owned) return nullptr;
  const at::Tensor source =
      cast->source_place.Over(c10::Storage(std::move(storage)));
  source.unsafeGetTensorImpl()->set_version_counter(
      cast->source_version.counter());
  return std::make_unique<SavedCastImpl>(std::move(cast), owned, source,
                                         tensor);
}

}  // namespace tessera
