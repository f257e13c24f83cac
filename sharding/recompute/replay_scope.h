// ReplayScope: sets the state of a thread that recomputes activations: without
// the user's autograd, autocast, inference mode or forward AD, and without
// watches. Unlike in a TorchScope, tags are seen: parameters are gathered and
// pinned as in the forward.
#ifndef SHARDING_RECOMPUTE_REPLAY_SCOPE_H_
#define SHARDING_RECOMPUTE_REPLAY_SCOPE_H_

#include "ATen/core/grad_mode.h"
#include "c10/core/AutogradState.h"
#include "c10/core/InferenceMode.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "sharding/dispatch/operator_watch.h"

namespace tessera {

class ReplayScope {
 public:
  ReplayScope() : followed_(FollowsAll()) { FollowAll(false); }
  ~ReplayScope() { FollowAll(followed_); }
  ReplayScope(const ReplayScope&) = delete;
  ReplayScope& operator=(const ReplayScope&) = delete;

 private:
  const bool followed_;
  c10::InferenceMode no_inference_{false};
  at::NoGradGuard no_grad_;
  c10::AutoFwGradMode no_forward_ad_{false};
  c10::impl::ExcludeDispatchKeyGuard exclude_{c10::autocast_dispatch_keyset};
  WatchScope nobody_{nullptr};
  ReplayMark mark_;
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_REPLAY_SCOPE_H_
