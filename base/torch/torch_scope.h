// TorchScope is the thread-local state for the engine's own tensor work when it
// is called from inside the dispatcher, a hook or a user's thread: tags not
// seen, no autograd, no autocast, no inference mode, no forward AD. The user's
// state must not leak in (an inference-mode buffer, a cast gradient), and our
// work must not be seen by our own fallback.
#ifndef BASE_TORCH_TORCH_SCOPE_H_
#define BASE_TORCH_TORCH_SCOPE_H_

#include "ATen/core/grad_mode.h"
#include "c10/core/AutogradState.h"
#include "c10/core/InferenceMode.h"
#include "c10/core/impl/LocalDispatchKeySet.h"

namespace tessera {

// The dispatch key that tags carry. Nobody else uses it; a second library that
// registers a fallback for it is refused by libtorch when it is loaded.
inline constexpr c10::DispatchKey kTagKey = c10::DispatchKey::DeferredInit;

class TorchScope {
 private:
  c10::InferenceMode no_inference_{false};
  at::NoGradGuard no_grad_;
  c10::AutoFwGradMode no_forward_ad_{false};
  c10::impl::ExcludeDispatchKeyGuard exclude_{
      c10::autocast_dispatch_keyset.add(kTagKey)};
  class Depth {
   public:
    Depth() { ++t_depth; }
    ~Depth() { --t_depth; }
    static bool IsSet() { return t_depth > 0; }

   private:
    static inline thread_local int t_depth = 0;
  };
  Depth depth_;

 public:
  // Whether this thread is in one: who runs operators below autograd
  // (base/above/below_autograd.h) need not follow them.
  static bool IsSet() { return Depth::IsSet(); }
};

}  // namespace tessera
#endif  // BASE_TORCH_TORCH_SCOPE_H_
