#include "sharding/dispatch/autocast.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "ATen/autocast_mode.h"
#include "ATen/core/grad_mode.h"
#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "base/torch/torch_scope.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

using WeakTensor =
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// A NoAutocastCache stands in the way of the user's cache.
thread_local bool cache_is_missed = false;

// A tensor that libtorch's cache holds until it is cleared: another one after
// that. Tells how long casts are shared.
at::Tensor CacheToken(at::Device device, at::ScalarType dtype) {
  static absl::Mutex mutex(absl::kConstInit);
  static auto* sources = new std::map<std::pair<int, int>, at::Tensor>();
  at::Tensor source;
  {
    absl::MutexLock lock(&mutex);
    at::Tensor& kept =
        (*sources)[{static_cast<int>(device.type()), device.index()}];
    if (!kept.defined()) {
      TorchScope scope;
      kept = at::zeros({1}, device);
      kept.set_requires_grad(true);
    }
    source = kept;
  }
  struct CacheOn {
    CacheOn() { at::autocast::set_autocast_cache_enabled(true); }
    ~CacheOn() { at::autocast::set_autocast_cache_enabled(false); }
  } cache_on;
  // libtorch casts with its cache locked: that cast must not come here again.
  c10::impl::ExcludeDispatchKeyGuard unseen{c10::DispatchKeySet(kTagKey)};
  return at::autocast::cached_cast(dtype, source, device.type());
}

// The nodes of the casts that the cache would hold.
class Histories {
 public:
  static Histories& Global() {
    static Histories* histories = new Histories();
    return *histories;
  }

  // The node of the casts of `source`: that of an earlier cast under the same
  // token if there is a graph that it belongs to, else this cast's own.
  std::shared_ptr<torch::autograd::Node> Node(const at::Tensor& source,
                                              const at::Tensor& cast,
                                              const at::Tensor& token) {
    absl::MutexLock lock(&mutex_);
    if (entries_.size() >= prune_at_) {
      absl::erase_if(entries_,
                     [](const auto& e) { return e.second.node.expired(); });
      prune_at_ = std::max(kPruneAt, 2 * entries_.size());
    }
    const c10::TensorImpl* key = source.unsafeGetTensorImpl();
    if (auto it = entries_.find(key); it != entries_.end()) {
      const Entry& entry = it->second;
      auto node = entry.node.lock();
      if (node != nullptr && entry.dtype == cast.scalar_type() &&
          entry.token._unsafe_get_target() == token.unsafeGetTensorImpl()) {
        return node;
      }
    }
    entries_.insert_or_assign(key, Entry{WeakTensor(source.getIntrusivePtr()),
                                         WeakTensor(token.getIntrusivePtr()),
                                         cast.grad_fn(), cast.scalar_type()});
    return cast.grad_fn();
  }

 private:
  struct Entry {
    WeakTensor source, token;  // so that their addresses are not used again
    std::weak_ptr<torch::autograd::Node> node;
    at::ScalarType dtype;
  };
  static constexpr size_t kPruneAt = 256;
  absl::Mutex mutex_;
  absl::flat_hash_map<const c10::TensorImpl*, Entry> entries_
      ABSL_GUARDED_BY(mutex_);
  size_t prune_at_ ABSL_GUARDED_BY(mutex_) = kPruneAt;
};

// libtorch's conditions.
bool WouldBeCached(const at::Tensor& source, const at::Tensor& cast) {
  return source.scalar_type() == at::kFloat && source.requires_grad() &&
         !source.is_view() && source.is_leaf() &&
         cast.scalar_type() ==
             at::autocast::get_autocast_dtype(source.device().type());
}

}  // namespace

NoAutocastCache::NoAutocastCache()
    : was_enabled_(at::autocast::is_autocast_cache_enabled()),
      outer_(cache_is_missed) {
  cache_is_missed = was_enabled_;
  at::autocast::set_autocast_cache_enabled(false);
}

NoAutocastCache::~NoAutocastCache() {
  at::autocast::set_autocast_cache_enabled(was_enabled_);
  cache_is_missed = outer_;
}

at::Tensor WithCachedHistory(const at::Tensor& source, at::Tensor cast) {
  // Without a gradient libtorch would cache a cast that cuts the graph of all
  // later uses; that is not followed.
  if (!cache_is_missed || !cast.requires_grad() ||
      !WouldBeCached(source, cast)) {
    return cast;
  }
  auto node = Histories::Global().Node(
      source, cast, CacheToken(source.device(), cast.scalar_type()));
  if (node == cast.grad_fn()) return cast;
  return torch::autograd::make_variable(
      cast.variable_data(), torch::autograd::Edge(std::move(node), 0));
}

}  // namespace tessera
