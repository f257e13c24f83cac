// Autocast on parameters that flat parameters own, without libtorch's cache.
//
// libtorch's autocast keeps each parameter's cast in a cache of its own, so
// that a parameter that is used twice is cast once. That cache would hold all
// parameters whole, and go on giving out a cast after a Step. So the cache is
// switched off while an operator casts tagged arguments, and only then. A
// cached cast has one node in the graph for all its uses, which adds their
// gradients in the low dtype; that is kept, so results equal libtorch's to the
// bit, whether the user has the cache on or off.
//
// Threads: any.
#ifndef SHARDING_DISPATCH_AUTOCAST_H_
#define SHARDING_DISPATCH_AUTOCAST_H_

#include "ATen/core/Tensor.h"
#include "c10/core/DispatchKeySet.h"
#include "c10/core/impl/LocalDispatchKeySet.h"

namespace tessera {

static_assert(
    c10::default_excluded_set.has_all(c10::autocast_dispatch_keyset),
    "libtorch switches autocast on by taking its keys out of those that it "
    "excludes");

// Returns whether autocast is on for this thread, for any device.
inline bool AutocastIsOn() {
  const auto off = c10::impl::tls_local_dispatch_key_set().excluded_;
  return !off.has_all(c10::autocast_dispatch_keyset);
}
// Returns whether autocast casts arguments of the operator that is dispatched
// with `keys`. For an operator that it does not know, it acts on the operators
// inside of it.
inline bool AutocastTakes(c10::DispatchKeySet keys) {
  return keys.has_any(c10::autocast_dispatch_keyset);
}

// Switches autocast's cache off on this thread while it lives.
class NoAutocastCache {
 public:
  NoAutocastCache();
  ~NoAutocastCache();
  NoAutocastCache(const NoAutocastCache&) = delete;
  NoAutocastCache& operator=(const NoAutocastCache&) = delete;

 private:
  const bool was_enabled_;
  const bool outer_;
};

// Returns `cast`, a fresh cast of `source`; within a NoAutocastCache with the
// history that it would have had from the cache.
at::Tensor WithCachedHistory(const at::Tensor& source, at::Tensor cast);

}  // namespace tessera
#endif  // SHARDING_DISPATCH_AUTOCAST_H_
