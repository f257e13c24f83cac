// Autocast on parameters that flat parameters own.
//
// libtorch's autocast keeps each parameter's cast in a cache of its own, so
// that a parameter that is used twice is cast once. That cache would hold all
// parameters whole, and go on giving out a cast after a Step. So it is switched
// off while an operator casts tagged arguments, and nowhere else. What a cached
// cast has beyond its values, one node in the graph for all its uses (which
// adds their gradients up in the low dtype), is kept: results equal libtorch's
// to the bit, whether the user has the cache on or off.
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

// True if autocast is on for this thread, for whatever device.
inline bool AutocastIsOn() {
  const auto off = c10::impl::tls_local_dispatch_key_set().excluded_;
  return !off.has_all(c10::autocast_dispatch_keyset);
}
// True if it casts arguments of the operator that is dispatched with `keys`.
// One that it does not know is left to the operators inside of it.
inline bool AutocastTakes(c10::DispatchKeySet keys) {
  return keys.has_any(c10::autocast_dispatch_keyset);
}

// For its life, on this thread, autocast's cache is off.
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

// `cast`, a fresh cast of `source`. If a NoAutocastCache keeps it from the
// cache: with the history that it would have had from there.
at::Tensor WithCachedHistory(const at::Tensor& source, at::Tensor cast);

}  // namespace tessera
#endif  // SHARDING_DISPATCH_AUTOCAST_H_
